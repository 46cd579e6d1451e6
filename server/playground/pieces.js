// The prompt as it is put together: texts, embeddings and soft prompts, in order. Used by app.js.
//
// A text is a box to write in; an embedding is a file, sent as it is. Its header is read only to show what it is.

const LARGEST = 1 << 30; // bytes; what the server takes is the server's to say

export class Pieces {
  /** `list`: the <ol>. */
  constructor(list) {
    this.list = list;
    this.pieces = [];
    this.addText();
  }

  addText(text = "") {
    const box = element("textarea", { rows: 1, spellcheck: false, placeholder: "Text" });
    box.setAttribute("aria-label", "Text");
    box.value = text;
    box.addEventListener("input", () => fit(box));
    this.#add({ kind: "text", box }, box);
    fit(box);
    box.focus();
  }

  async addFile(file) {
    if (file.size > LARGEST) throw new Error(`${file.name} is larger than a gigabyte.`);
    const [data, about] = await Promise.all([asBase64(file), describe(file)]);
    const piece = { kind: "rows", data, label: file.name, about };
    this.#add(piece, labelled("rows", file.name, about));
  }

  addSoftPrompt(name) {
    this.#add({ kind: "soft", name, label: name }, labelled("soft", name, "soft prompt"));
  }

  clear() {
    this.pieces = [];
    this.list.replaceChildren();
    this.addText();
  }

  get isEmpty() {
    return this.pieces.every((piece) => piece.kind === "text" && !piece.box.value);
  }

  /** A string where the prompt is one text, else parts as the server takes them. */
  content() {
    const filled = this.pieces.filter((piece) => piece.kind !== "text" || piece.box.value);
    if (filled.length === 1 && filled[0].kind === "text") return filled[0].box.value;
    return filled.map((piece) => {
      if (piece.kind === "text") return { type: "text", text: piece.box.value };
      if (piece.kind === "soft") return { type: "soft_prompt", name: piece.name };
      return { type: "prompt_embeds", data: piece.data };
    });
  }

  /** The same to be looked at: [kind, text] each. */
  summary() {
    return this.pieces
      .filter((piece) => piece.kind !== "text" || piece.box.value)
      .map((piece) => [piece.kind, piece.kind === "text" ? piece.box.value : piece.label]);
  }

  #add(piece, body) {
    const item = element("li", { className: `piece ${piece.kind}` });
    const tools = element("span", { className: "tools" });
    tools.append(
      tool("↑", "Move up", () => this.#move(piece, -1)),
      tool("↓", "Move down", () => this.#move(piece, 1)),
      tool("×", "Remove", () => this.#remove(piece)),
    );
    item.append(body, tools);
    piece.item = item;
    this.pieces.push(piece);
    this.list.append(item);
    this.#count();
  }

  #move(piece, by) {
    const from = this.pieces.indexOf(piece);
    const to = from + by;
    if (to < 0 || to >= this.pieces.length) return;
    this.pieces.splice(from, 1);
    this.pieces.splice(to, 0, piece);
    const focused = document.activeElement;
    this.list.replaceChildren(...this.pieces.map((each) => each.item));
    focused?.focus();
  }

  #remove(piece) {
    this.pieces.splice(this.pieces.indexOf(piece), 1);
    piece.item.remove();
    if (!this.pieces.length) this.addText();
    this.#count();
  }

  #count() {
    this.list.classList.toggle("several", this.pieces.length > 1);
  }
}

export function element(name, properties = {}, text = "") {
  const made = Object.assign(document.createElement(name), properties);
  if (text) made.textContent = text;
  return made;
}

/** A chip for something that is not text. */
export function labelled(kind, name, about = "") {
  const chip = element("span", { className: `chip ${kind}` });
  chip.append(element("b", {}, name));
  if (about) chip.append(element("small", {}, about));
  return chip;
}

function tool(sign, title, act) {
  const button = element("button", { type: "button", title }, sign);
  button.setAttribute("aria-label", title);
  button.addEventListener("click", act);
  return button;
}

/** As high as its text, up to a limit that the style sets. */
function fit(box) {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight}px`;
}

function asBase64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** Shape and dtype, as far as the file's first bytes say. */
async function describe(file) {
  const size = `${(file.size / 1024).toLocaleString("en", { maximumFractionDigits: 0 })} KiB`;
  const head = new Uint8Array(await file.slice(0, 65536).arrayBuffer());
  const view = new DataView(head.buffer);
  try {
    if (head[0] === 0x93) {
      const text = new TextDecoder("latin1").decode(head.slice(10, 10 + view.getUint16(8, true)));
      const shape = /'shape':\s*\(([^)]*)\)/.exec(text)?.[1].split(",").filter((part) => part.trim());
      const dtype = /'descr':\s*'([^']*)'/.exec(text)?.[1];
      return shape ? `${shape.map((part) => part.trim()).join(" × ")} ${dtype}, ${size}` : size;
    }
    if (head[8] === 0x7b) {
      const header = JSON.parse(new TextDecoder().decode(head.slice(8, 8 + Number(view.getBigUint64(0, true)))));
      delete header.__metadata__;
      const tensors = Object.values(header);
      if (tensors.length === 1) return `${tensors[0].shape.join(" × ")} ${tensors[0].dtype}, ${size}`;
      return `${tensors.length} tensors, ${size}`;
    }
  } catch {
    // the server will say what is wrong with it
  }
  return size;
}
