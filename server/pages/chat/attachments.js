
// Text files and long pastes that go with a message.

const MAX_FILE_BYTES = 256 * 1024;
const MAX_FILES = 10;
const LONG_PASTE = 3000; // characters from which a paste is a file

/** A message as the model reads it: its files before it, each between fences longer than any within. */
function withFiles({ content, files }) {
  if (!files?.length) return content;
  const blocks = files.map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`{3,}/g)].map(([mark]) => mark.length + 1)));
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, content].filter((part) => part.trim()).join("\n\n");
}

function chipNode({ name, text }, button) {
  const lines = text.replace(/\n$/, "").split("\n").length;
  return element("li", { class: "chip" }, element("details", {},
    element("summary", { title: name }, icon("file"), element("span", { class: "name" }, name), element("span", { class: "size" }, count(lines, "line"))),
    element("pre", { tabindex: "0" }, element("code", {}, text))), ...(button ? [button] : []));
}

/** What is attached to the message that is being written. on: { change(), problem(sentence) }. */
class Attachments {
  constructor(on) {
    this.on = on;
    this.files = [];
    byId("attach").addEventListener("click", () => byId("files").click());
    byId("files").addEventListener("change", () => {
      this.#read([...byId("files").files]);
      byId("files").value = "";
    });
    byId("input").addEventListener("paste", (event) => this.#paste(event));
    const stage = byId("stage");
    stage.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      stage.classList.add("drop");
    });
    stage.addEventListener("dragleave", (event) => event.relatedTarget && stage.contains(event.relatedTarget) || stage.classList.remove("drop"));
    stage.addEventListener("drop", (event) => {
      stage.classList.remove("drop");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.#read([...event.dataTransfer.files]);
    });
  }

  /** Hand over what is attached. */
  take() {
    const taken = this.files;
    this.files = [];
    this.#draw();
    return taken;
  }

  #paste(event) {
    const { files } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain");
    if (files.length && !text) {
      event.preventDefault();
      this.#read([...files]);
    } else if (text.length >= LONG_PASTE) {
      event.preventDefault();
      this.#add("Pasted text", text);
    }
  }

  async #read(files) {
    for (const file of files) {
      if (file.size > MAX_FILE_BYTES) {
        this.on.problem(`${file.name} has ${sizeOf(file.size)}; a file may have ${sizeOf(MAX_FILE_BYTES)}.`);
        continue;
      }
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError("binary");
        this.#add(file.name, text);
      } catch (error) {
        this.on.problem(error instanceof TypeError ? `${file.name} is no text in UTF-8; only text can be attached.` : `${file.name} cannot be read: ${error.message}`);
      }
    }
  }

  #add(name, text) {
    const numBytes = new TextEncoder().encode(text).length;
    if (numBytes > MAX_FILE_BYTES) return this.on.problem(`${name} has ${sizeOf(numBytes)}; a file may have ${sizeOf(MAX_FILE_BYTES)}.`);
    if (!text.trim()) return this.on.problem(`${name} is empty.`);
    if (this.files.length >= MAX_FILES) return this.on.problem(`A message takes ${MAX_FILES} files; ${name} was left out.`);
    this.files.push({ name, text });
    this.#draw();
    say(`Attached: ${name}`);
  }

  #draw() {
    byId("chips").hidden = !this.files.length;
    byId("chips").replaceChildren(...this.files.map((file) => chipNode(file, iconButton("close", `Remove ${file.name}`, () => {
      this.files = this.files.filter((one) => one !== file);
      this.#draw();
      byId("input").focus();
    }))));
    this.on.change();
  }
}

function sizeOf(numBytes) {
  return numBytes < 1024 * 1024 ? `${Math.ceil(numBytes / 1024).toLocaleString("en-US")} KiB` : `${(numBytes / 1024 / 1024).toFixed(1)} MiB`;
}
