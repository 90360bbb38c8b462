
// "Try it": a request that can be changed and sent to this server, and the same for curl.

const KEY_NAME = "quire.key"; // the other pages use the same
const MAX_SHOWN = 60000; // characters of an answer

function baseUrl() {
  return new URL(".", location.href.split(/[?#]/)[0]).href;
}

/** As a command of a shell. The key is a variable: it is never written out. */
function asCurl(method, path, body) {
  const parts = [`curl ${method === "GET" || method === "POST" ? "" : `-X ${method} `}'${baseUrl()}${path.slice(1)}'`];
  if (sessionStorage.getItem(KEY_NAME)) parts.push('-H "Authorization: Bearer $QUIRE_API_KEY"');
  if (body !== null) parts.push("-H 'Content-Type: application/json'", `-d '${body.replaceAll("'", "'\\''")}'`);
  return parts.join(" \\\n  ");
}

async function copyFrom(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // without HTTPS there is no clipboard object
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = label; }, 1400);
}

function button(label, onClick, className) {
  const made = element("button", { type: "button", class: className }, label);
  made.addEventListener("click", () => onClick(made));
  return made;
}

class Trial {
  /** example: a body, undefined for a route without one; names: parameters of the path. */
  constructor(method, path, example, names) {
    Object.assign(this, { method: method.toUpperCase(), path });
    this.controller = null;
    this.area = example === undefined ? null : element("textarea", { "aria-label": `Body of ${path}`, spellcheck: "false" });
    if (this.area) this.#fill(example);
    this.fields = names.map((name) => element("input", { "aria-label": name, placeholder: name, spellcheck: "false" }));
    this.names = names;
    this.send = button("Send", () => this.#send(), "send");
    this.curl = element("pre", { tabindex: "0", "aria-label": `curl for ${path}` });
    const canStream = this.area && path.startsWith("/v1/") && !/embeddings|render|count_tokens/.test(path);
    const extra = canStream ? [button("Stream", () => this.#setStream())] : [];
    this.status = element("span", { class: "status", role: "status" });
    this.output = element("pre", { tabindex: "0", "aria-label": `Answer of ${path}` });
    this.result = element("div", { class: "result", hidden: "" }, element("div", { class: "bar" }, this.status), this.output);
    this.node = element("div", { class: "try" },
      element("div", { class: "bar" }, element("b", {}, "Try it"), ...this.fields, element("span", { class: "room" }), ...extra,
        button("Copy as curl", (made) => copyFrom(made, this.#curl())), this.send),
      this.area ?? this.curl, this.result);
    for (const field of [this.area, ...this.fields]) field?.addEventListener("input", () => this.draw());
    this.draw();
  }

  draw() {
    this.curl.textContent = this.#curl();
  }

  #fill(body) {
    this.area.value = JSON.stringify(body, null, 2);
    this.area.rows = Math.min(this.area.value.split("\n").length, 20);
  }

  #curl() {
    return asCurl(this.method, this.#address(), this.area && this.area.value);
  }

  #address() {
    return this.names.reduce((path, name, i) => path.replace(`{${name}}`, encodeURIComponent(this.fields[i].value) || `{${name}}`), this.path);
  }

  #setStream() {
    try {
      const body = JSON.parse(this.area.value);
      this.#fill({ ...body, stream: !body.stream });
      this.draw();
    } catch (error) {
      this.#show(`The body is not JSON: ${error.message}`, true);
    }
  }

  #show(text, isBad) {
    this.result.hidden = false;
    this.status.textContent = text;
    this.status.classList.toggle("bad", isBad);
  }

  async #send() {
    if (this.controller) return this.controller.abort();
    const empty = this.fields.find((field) => !field.value);
    if (empty) {
      this.#show(`${empty.placeholder} is missing.`, true);
      return empty.focus();
    }
    this.controller = new AbortController();
    this.send.textContent = "Stop";
    this.output.textContent = "";
    this.#show("Waiting …", false);
    const key = sessionStorage.getItem(KEY_NAME);
    const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(this.area && { "content-type": "application/json" }) };
    const start = performance.now();
    try {
      const reply = await fetch(this.#address().slice(1), { method: this.method, headers, body: this.area?.value, signal: this.controller.signal, cache: "no-store" });
      await this.#read(reply, start);
    } catch (error) {
      this.#show(error.name === "AbortError" ? "Stopped" : "The server does not answer.", true);
    }
    this.controller = null;
    this.send.textContent = "Send";
  }

  async #read(reply, start) {
    const tell = () => this.#show(`${reply.status} ${reply.statusText} · ${Math.round(performance.now() - start)} ms`, !reply.ok);
    const isStream = reply.headers.get("content-type")?.startsWith("text/event-stream");
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const { done, value } = await reader.read();
      text += value ?? "";
      if (isStream || done) this.output.textContent = shown(done && !isStream ? pretty(text) : text);
      if (isStream) this.output.scrollTop = this.output.scrollHeight;
      tell();
      if (done) return;
    }
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // metrics, a proxy's own page
  }
}

function shown(text) {
  return text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}\n… and ${(text.length - MAX_SHOWN).toLocaleString("en-US")} characters more` : text;
}
