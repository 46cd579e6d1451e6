// An answer token by token: coloured by probability, with the alternatives of the one that is pointed at. Used by app.js.
//
// The strip is one stop of the tab key; the arrow keys walk through its tokens.

import { element } from "./pieces.js";

const details = document.getElementById("details");

export class TokenStrip {
  /** `box`: the element that the text goes into. `coloured`: whether tokens show their probability. */
  constructor(box, coloured) {
    this.box = box;
    this.tokens = [];
    this.current = -1;
    this.colour(coloured);
    box.addEventListener("pointerover", (event) => this.#point(event.target));
    box.addEventListener("pointerleave", () => this.hide());
    box.addEventListener("focus", () => this.#show(Math.max(this.current, 0)));
    box.addEventListener("blur", () => this.hide());
    box.addEventListener("keydown", (event) => this.#walk(event));
  }

  colour(on) {
    this.box.classList.toggle("coloured", on);
    this.box.setAttribute("role", "group");
    this.box.setAttribute("aria-label", on ? "Answer, by token: arrow keys" : "Answer");
    if (on && this.tokens.length) this.box.tabIndex = 0;
    else this.box.removeAttribute("tabindex");
  }

  /** `token`: {name, text, unseen, logprob, top: [[name, logprob], …]}; without a logprob it is plain text. */
  push(token) {
    if (token.logprob === undefined) {
      this.box.append(token.text);
      return;
    }
    const probability = Math.exp(token.logprob);
    const kind = token.unseen ? "unseen" : `p${Math.min(Math.floor(probability * 10), 9)}`;
    const span = element("span", { className: `token ${kind}` }, token.text);
    span.dataset.index = this.tokens.length;
    this.tokens.push({ ...token, span });
    this.box.append(span);
    if (this.box.classList.contains("coloured")) this.box.tabIndex = 0;
  }

  hide() {
    details.hidden = true;
    this.tokens[this.current]?.span.classList.remove("current");
  }

  #point(target) {
    const index = target.dataset?.index;
    if (index !== undefined && this.box.classList.contains("coloured")) this.#show(Number(index));
  }

  #walk(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.hide();
    if (!(event.key in steps) || !this.tokens.length) return;
    event.preventDefault();
    this.#show(Math.min(Math.max(this.current + steps[event.key], 0), this.tokens.length - 1));
  }

  #show(index) {
    const token = this.tokens[index];
    if (!token) return;
    this.tokens[this.current]?.span.classList.remove("current");
    this.current = index;
    token.span.classList.add("current");
    details.replaceChildren(heading(token), ...token.top.map(([name, logprob]) => row(name, logprob, token)));
    details.hidden = false;
    place(token.span);
  }
}

function heading(token) {
  const line = element("p", { className: "chosen" });
  line.append(element("code", {}, shown(token.name)), ` ${percent(token.logprob)}`);
  line.append(element("small", {}, ` logprob ${token.logprob.toFixed(3)}`));
  return line;
}

function row(name, logprob, token) {
  const line = element("div", { className: name === token.name ? "alternative chosen" : "alternative" });
  const bar = element("i");
  bar.style.width = `${Math.exp(logprob) * 100}%`;
  line.append(element("code", {}, shown(name)), bar, element("span", {}, percent(logprob)));
  return line;
}

function percent(logprob) {
  const value = Math.exp(logprob) * 100;
  return value < 0.1 ? "<0.1 %" : `${value.toFixed(1)} %`;
}

/** White space as something to be seen. */
function shown(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}

/** Below the token, or above it where there is no room. */
function place(span) {
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const own = details.getBoundingClientRect();
  const left = Math.min(at.left, innerWidth - own.width - 8);
  const below = at.bottom + 6;
  details.style.left = `${Math.max(left, 8)}px`;
  details.style.top = `${below + own.height < innerHeight ? below : Math.max(at.top - own.height - 6, 8)}px`;
}
