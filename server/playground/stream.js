// One request and its answer, as server-sent events. Used by app.js.

const API = "/v1";
const AT_ONCE = 8; // milliseconds of events

/** What the server said was wrong. */
export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function headers() {
  const key = sessionStorage.getItem("api_key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** JSON of a GET. Throws Problem. */
export async function get(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!response.ok) throw await problemOf(response);
  return response.json();
}

/** Each event's object, until [DONE]. Throws Problem, also for an error that comes within the stream. */
export async function* post(path, body, signal) {
  const response = await fetch(API + path, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await problemOf(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Problem(response.status, event.error.message);
    yield event;
  }
}

/** The `data:` of each event. Lines may come in pieces, and so may characters. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  let since = performance.now();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const text = line.endsWith("\r") ? line.slice(0, -1) : line;
      if (text === "" && data.length) {
        if (performance.now() - since > AT_ONCE) {
          await turn();
          since = performance.now();
        }
        yield data.join("\n");
        data = [];
      } else if (text.startsWith("data:")) {
        data.push(text.slice(5).replace(/^ /, ""));
      }
    }
  }
}

/** Until keys, clicks and frames that wait have had their turn: where the next piece is there already, `await` gives
 * them none. (Not by a timer, which a page that isn't seen gets once a second.) */
function turn() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

async function problemOf(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    message = body.error?.message ?? message;
  } catch {
    // not JSON: a proxy's page
  }
  return new Problem(response.status, message);
}
