// Which piece of an answer's text each of its tokens is. Used by app.js.

const ESCAPED = /^(bytes:)?((?:\\x[0-9a-f]{2})+)$/;

export class Spelling {
  constructor() {
    this.decoder = new TextDecoder();
  }

  /** The tokens that came with `text`, each with its own piece as `text`: empty where a character is not complete yet.
   * What is not in the text (the token that ended it, say) is `unseen`. Text without tokens comes as one piece. */
  spell(tokens, text) {
    let rest = text;
    const spelled = tokens.map((token) => {
      const own = this.decoder.decode(bytesOf(token), { stream: true });
      const seen = rest.startsWith(own);
      if (seen) rest = rest.slice(own.length);
      return { ...token, text: own, unseen: !seen };
    });
    if (!rest) return spelled;
    // A tokenizer whose tokens do not add up to the text: the text is right.
    return [...spelled.map((token) => ({ ...token, text: "" })), { text }];
  }
}

/** A token that is a part of a character is named by its bytes. */
function bytesOf({ name, bytes }) {
  if (bytes) return new Uint8Array(bytes);
  const escaped = ESCAPED.exec(name);
  if (!escaped) return new TextEncoder().encode(name);
  return Uint8Array.from(escaped[2].matchAll(/\\x(..)/g), (found) => parseInt(found[1], 16));
}
