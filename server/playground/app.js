// The playground: puts a request together, sends it, shows what comes. Whatever a model or a server says becomes text
// nodes and nothing else; the page's policy (require-trusted-types-for) forbids any other way.

import { EngineView } from "./engine.js";
import { Frames } from "./frames.js";
import { Pieces, element, labelled } from "./pieces.js";
import { Problem, get, post } from "./stream.js";
import { Spelling } from "./spelling.js";
import { TokenStrip } from "./tokens.js";

const ALTERNATIVES = 5;
const byId = (id) => document.getElementById(id);

const engine = new EngineView();
const pieces = new Pieces(byId("pieces"));
const frames = new Frames(byId("transcript"));
const strips = [];
let mode = "chat";
let messages = [];
let running = null;

// --- what is served ---------------------------------------------------------------------------------------------------

let connections = 0;

async function connect() {
  const number = ++connections;
  tell("");
  try {
    const [models, config] = await Promise.all([get("/v1/models"), get("/playground/config")]);
    if (number !== connections) return;
    showModels(models.data);
    showConfig(config);
    engine.start(config);
  } catch (error) {
    if (number !== connections) return;
    engine.stop("not reached");
    if (error instanceof Problem && error.status === 401) {
      tell("This server wants an API key.");
      byId("key").focus();
    } else if (error instanceof Problem && error.status === 503) {
      engine.stop("loading");
      setTimeout(() => number === connections && connect(), 1000);
    } else {
      tell(error.message);
    }
  }
}

function showModels(cards) {
  const chosen = byId("model").value;
  byId("model").replaceChildren(...cards.map((card) => element("option", { value: card.id }, card.id)));
  if (cards.some((card) => card.id === chosen)) byId("model").value = chosen;
}

function showConfig(config) {
  const facts = [
    ["architecture", config.model_type],
    ["dtype", config.dtype],
    ["hidden size", config.hidden_size],
    ["context", `${config.max_model_len.toLocaleString("en")} rows`],
    ["block", `${config.block_size} rows`],
  ];
  byId("facts").replaceChildren(
    ...facts.map(([name, value]) => {
      const pair = element("div");
      pair.append(element("dt", {}, name), element("dd", {}, String(value)));
      return pair;
    }),
  );
  byId("add-rows").hidden = !config.takes_embeddings;
  const soft = byId("add-soft");
  soft.hidden = !config.soft_prompts.length;
  soft.replaceChildren(soft.options[0], ...config.soft_prompts.map((name) => element("option", { value: name }, name)));
}

// --- a request --------------------------------------------------------------------------------------------------------

function sampling() {
  const chosen = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = byId(name).valueAsNumber;
    if (!Number.isNaN(value)) chosen[name] = value;
  }
  return chosen;
}

async function send() {
  if (running || pieces.isEmpty) return;
  tell("");
  const content = pieces.content();
  const turn = show(pieces.summary());
  const controller = new AbortController();
  running = controller;
  busy(true);
  const clock = new Clock();
  try {
    if (mode === "chat") await chat(content, turn, clock, controller.signal);
    else await complete(content, turn, clock, controller.signal);
    pieces.clear();
  } catch (error) {
    if (error.name === "AbortError") {
      turn.note.textContent = "stopped";
      pieces.clear();
    } else {
      tell(error.message);
      if (!clock.first) turn.all.remove();
    }
  } finally {
    frames.flush();
    running = null;
    busy(false);
    engine.poll();
  }
}

async function chat(content, turn, clock, signal) {
  const system = byId("system").value;
  const question = { role: "user", content };
  const asked = [...(system ? [{ role: "system", content: system }] : []), ...messages, question];
  const body = { model: byId("model").value, messages: asked, ...sampling() };
  if (byId("tokens").checked) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  const spelling = new Spelling();
  let answer = "";
  let thoughts = "";
  try {
    for await (const event of post("/chat/completions", body, signal)) {
      clock.take(event, turn.note);
      for (const { delta, logprobs } of event.choices) {
        const thought = delta.reasoning_content ?? "";
        thoughts += thought;
        answer += delta.content ?? "";
        const tokens = thought ? [] : (logprobs?.content ?? []).map(fromChat);
        const spelled = spelling.spell(tokens, delta.content ?? "");
        frames.add(() => {
          if (thought) {
            turn.thoughts.hidden = false;
            turn.thoughts.append(thought);
          }
          spelled.forEach((token) => turn.strip.push(token));
        });
      }
    }
  } finally {
    // What was said stays said, also where it was stopped.
    if (answer || thoughts) messages.push(question, { role: "assistant", content: answer });
  }
}

async function complete(prompt, turn, clock, signal) {
  const body = { model: byId("model").value, prompt, ...sampling() };
  if (byId("tokens").checked) body.logprobs = ALTERNATIVES;
  const spelling = new Spelling();
  for await (const event of post("/completions", body, signal)) {
    clock.take(event, turn.note);
    for (const { text, logprobs } of event.choices) {
      const spelled = spelling.spell(logprobs ? fromCompletion(logprobs) : [], text);
      frames.add(() => spelled.forEach((token) => turn.strip.push(token)));
    }
  }
}

// A token as `spelling` and `tokens` take it: {name, logprob, top: [[name, logprob], …]}.

function fromChat({ token, bytes, logprob, top_logprobs }) {
  return { name: token, bytes, logprob, top: top_logprobs.map((each) => [each.token, each.logprob]) };
}

function fromCompletion(logprobs) {
  return logprobs.tokens.map((name, i) => ({
    name,
    logprob: logprobs.token_logprobs[i] ?? undefined,
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}).sort((a, b) => b[1] - a[1]).slice(0, ALTERNATIVES),
  }));
}

/** What an answer cost, told when its usage comes. */
class Clock {
  constructor() {
    this.started = performance.now();
    this.first = 0;
    this.reason = "";
  }

  take(event, note) {
    if (event.choices.length) this.first ||= performance.now();
    this.reason = event.choices[0]?.finish_reason ?? this.reason;
    if (!event.usage) return;
    const { prompt_tokens: prompt, completion_tokens: made, prompt_tokens_details: details } = event.usage;
    const cached = details?.cached_tokens ? ` (${details.cached_tokens} cached)` : "";
    const seconds = (performance.now() - this.first) / 1000;
    const rate = made > 1 && seconds > 0 ? `, ${((made - 1) / seconds).toFixed(1)} tokens/s` : "";
    const wait = `${Math.round(this.first - this.started)} ms to the first`;
    note.textContent = `${prompt} rows in${cached}, ${made} tokens out, ${wait}${rate}, ${this.reason}`;
  }
}

// --- what is seen -----------------------------------------------------------------------------------------------------

/** A question and the place of its answer. */
function show(summary) {
  byId("welcome").hidden = true;
  const all = element("article", { className: `turn ${mode}` });
  const question = element("div", { className: "question" });
  for (const [kind, text] of summary) question.append(kind === "text" ? text : labelled(kind, text));
  const thoughts = element("div", { className: "thoughts", hidden: true });
  const box = element("div", { className: "answer" });
  const note = element("p", { className: "note" });
  all.append(question, thoughts, box, note);
  byId("transcript").append(all);
  all.scrollIntoView({ block: "end" });
  const strip = new TokenStrip(box, byId("tokens").checked);
  strips.push(strip);
  return { all, thoughts, strip, note };
}

function busy(on) {
  byId("send").hidden = on;
  byId("stop").hidden = !on;
  byId("transcript").setAttribute("aria-busy", String(on));
}

function tell(problem) {
  byId("problem").textContent = problem;
  byId("problem").hidden = !problem;
}

function forget() {
  running?.abort();
  messages = [];
  strips.length = 0;
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  byId("welcome").hidden = false;
  byId("details").hidden = true;
  pieces.clear();
  tell("");
}

function choose(tab) {
  mode = tab.dataset.mode;
  for (const each of document.querySelectorAll("[role=tab]")) {
    each.setAttribute("aria-selected", String(each === tab));
    each.tabIndex = each === tab ? 0 : -1;
  }
  byId("work").setAttribute("aria-labelledby", tab.id);
  byId("system-label").hidden = mode !== "chat";
  forget();
}

// --- hands ------------------------------------------------------------------------------------------------------------

async function attach(files) {
  for (const file of files) {
    try {
      await pieces.addFile(file);
    } catch (error) {
      tell(error.message);
    }
  }
}

const tabs = [...document.querySelectorAll("[role=tab]")];
for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[1 - tabs.indexOf(tab)];
    choose(other);
    other.focus();
  });
}
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("composer").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", forget);
byId("add-text").addEventListener("click", () => pieces.addText());
byId("add-rows").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", async () => {
  await attach(byId("file").files);
  byId("file").value = "";
});
byId("add-soft").addEventListener("change", () => {
  if (byId("add-soft").value) pieces.addSoftPrompt(byId("add-soft").value);
  byId("add-soft").value = "";
});
byId("tokens").addEventListener("change", () => strips.forEach((strip) => strip.colour(byId("tokens").checked)));
byId("key").addEventListener("change", () => {
  sessionStorage.setItem("api_key", byId("key").value);
  connect();
});
for (const kind of ["dragover", "drop"]) {
  byId("composer").addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    byId("composer").classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") attach(event.dataTransfer.files);
  });
}
byId("composer").addEventListener("dragleave", () => byId("composer").classList.remove("dropping"));

byId("key").value = sessionStorage.getItem("api_key") ?? "";
if (/Mac|iPhone|iPad/.test(navigator.platform)) byId("send").querySelector("kbd").textContent = "⌘ ↵";
connect();
