// Puts what comes on the page, a frame's worth at a time: an answer may have a thousand tokens a second, and to lay out
// the page for each of them would leave it no time for anything else. Used by app.js.

const NEAR_END = 120; // pixels

export class Frames {
  /** `view`: what is scrolled to its end, unless the reader has gone up. */
  constructor(view) {
    this.view = view;
    this.changes = [];
    this.asked = 0;
  }

  /** `change`: a function without arguments, called in the next frame, in turn. */
  add(change) {
    this.changes.push(change);
    this.asked ||= requestAnimationFrame(() => this.flush());
  }

  /** All of them, now. */
  flush() {
    cancelAnimationFrame(this.asked);
    this.asked = 0;
    if (!this.changes.length) return;
    const { view } = this;
    const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < NEAR_END;
    for (const change of this.changes.splice(0)) change();
    if (isAtEnd) view.scrollTop = view.scrollHeight;
  }
}
