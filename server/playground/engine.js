// The live view of the engine, from /metrics once a second while somebody looks. Used by app.js.

import { headers } from "./stream.js";

const PREFIX = "intarsia:";
const SECONDS = 60;
const byId = (id) => document.getElementById(id);

export class EngineView {
  constructor() {
    this.config = null;
    this.rates = [];
    this.before = null;
    this.values = null;
    this.timer = 0;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(byId("engine"));
    document.addEventListener("visibilitychange", () => this.poll());
  }

  /** `config`: of /playground/config. Begins to poll. */
  start(config) {
    this.config = config;
    this.poll();
  }

  stop(state) {
    clearTimeout(this.timer);
    this.config = null;
    byId("engine-state").textContent = state;
  }

  async poll() {
    clearTimeout(this.timer);
    if (!this.config || document.hidden) return;
    const config = this.config;
    try {
      const response = await fetch("/metrics", { headers: headers(), cache: "no-store" });
      if (!response.ok) throw new Error(String(response.status));
      const text = await response.text();
      if (this.config !== config) return;
      this.update(parse(text), performance.now() / 1000);
    } catch {
      if (this.config === config) byId("engine-state").textContent = "not reached";
    }
    if (this.config) this.timer = setTimeout(() => this.poll(), 1000);
  }

  update(values, now) {
    const made = values.generation_tokens_total ?? 0;
    if (this.before && made >= this.before.made) {
      this.rates.push((made - this.before.made) / Math.max(now - this.before.now, 0.001));
      this.rates = this.rates.slice(-SECONDS);
    }
    this.before = { made, now };
    this.values = values;
    const running = values.num_requests_running ?? 0;
    const queries = values.prefix_cache_queries_total ?? 0;
    byId("engine-state").textContent = running ? "at work" : "idle";
    byId("rate").textContent = format(this.rates.at(-1) ?? 0);
    byId("running").textContent = format(running);
    byId("waiting").textContent = format(values.num_requests_waiting ?? 0);
    byId("hits").textContent = queries ? `${((100 * (values.prefix_cache_hits_total ?? 0)) / queries).toFixed(0)} %` : "–";
    this.draw();
  }

  draw() {
    if (!this.config || !this.values) return;
    const { max_num_seqs: slots, num_blocks: blocks } = this.config;
    const running = this.values.num_requests_running ?? 0;
    const used = this.values.kv_cache_blocks_used ?? 0;
    const cached = this.values.kv_cache_blocks_cached ?? 0;
    const style = getComputedStyle(document.documentElement);
    const [full, warm, empty] = ["--teal", "--wood", "--line"].map((name) => style.getPropertyValue(name));
    for (const [name, what, count, inUse, kept] of [
      ["slots", "slots", slots, running, 0],
      ["blocks", "KV blocks", blocks, used, cached],
    ]) {
      const share = grid(byId(name), count, [[inUse + kept, warm], [inUse, full]], 5, empty);
      const more = kept ? `, ${format(kept)} cached` : ""; // No more than fits beside the name.
      byId(`${name}-label`).textContent = `${format(inUse)} of ${format(count)}${more}`;
      byId(name).title = share > 1 ? `${share} a square` : "";
      byId(name).setAttribute("aria-label", `${inUse} of ${count} ${what} in use${kept ? `, ${kept} cached` : ""}`);
    }
    line(byId("spark"), this.rates, style.getPropertyValue("--wood"));
  }
}

/** Metrics without labels but the model's: name to value. */
function parse(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const found = /^([^#{\s]+)(?:\{([^}]*)\})?\s+(\S+)/.exec(line);
    if (!found?.[1].startsWith(PREFIX)) continue;
    const name = found[1].slice(PREFIX.length);
    values[name] = (values[name] ?? 0) + Number(found[3]);
  }
  return values;
}

/** How many are in use, not which: squares from the left. `layers`: pairs of a number and its colour, each drawn over those
 * before it. Returns for how many each square stands. */
function grid(canvas, count, layers, least, empty) {
  const { context, width, height } = sized(canvas);
  const gap = 2;
  const fitting = Math.floor((width + gap) / (least + gap)) * Math.floor((height + gap) / (least + gap));
  const share = Math.max(Math.ceil(count / Math.max(fitting, 1)), 1);
  const squares = Math.ceil(count / share);
  // As large as they can be for all to fit.
  let side = least;
  while (side < 16 && Math.floor((width + gap) / (side + 1 + gap)) * Math.floor((height + gap) / (side + 1 + gap)) >= squares) side++;
  const columns = Math.max(Math.floor((width + gap) / (side + gap)), 1);
  for (let i = 0; i < squares; i++) {
    const x = (i % columns) * (side + gap);
    const y = Math.floor(i / columns) * (side + gap);
    context.fillStyle = empty;
    context.fillRect(x, y, side, side);
    for (const [number, colour] of layers) {
      const level = Math.min(Math.max(number / share - i, 0), 1);
      if (level > 0) {
        context.globalAlpha = 0.35 + 0.65 * level;
        context.fillStyle = colour;
        context.fillRect(x, y, side, side);
        context.globalAlpha = 1;
      }
    }
  }
  return share;
}

function line(canvas, values, colour) {
  const { context, width, height } = sized(canvas);
  const top = Math.max(...values, 1);
  const step = width / (SECONDS - 1);
  const start = width - (values.length - 1) * step;
  context.beginPath();
  values.forEach((value, i) => context.lineTo(start + i * step, height - 2 - (value / top) * (height - 4)));
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(start, height);
  context.globalAlpha = 0.12;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
}

/** The canvas cleared, in device pixels but measured in the page's. */
function sized(canvas) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

function format(value) {
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 && value % 1 ? 1 : 0 });
}
