
// A request in the words of curl, Python or JavaScript, to go on with elsewhere. A key is never among them.

const OF_THE_FIELD = ["top_k", "min_p", "continue_final_message"]; // beyond OpenAI's: its Python client takes them in extra_body
const LANGUAGES = { curl: { name: "bash", write: asCurl }, Python: { name: "python", write: asPython }, JavaScript: { name: "javascript", write: asJavaScript } };

/** The body without what only this page needs. */
function bodyToShow(settings, messages) {
  const { stream, stream_options: options, logprobs, top_logprobs: tops, ...body } = asRequest(settings, messages);
  const { model, ...others } = body;
  return model ? { model, ...others } : others;
}

function apiUrl() {
  return new URL(`${BASE}v1`, location.href.split(/[?#]/)[0]).href;
}

function asCurl(body, hasKey) {
  const key = hasKey ? ' \\\n  -H "Authorization: Bearer $QUIRE_API_KEY"' : "";
  const data = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${apiUrl()}/chat/completions${key} \\\n  -H "Content-Type: application/json" \\\n  -d '${data}'`;
}

function asPython(body, hasKey) {
  const known = Object.entries(body).filter(([name]) => !OF_THE_FIELD.includes(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => OF_THE_FIELD.includes(name)));
  const lines = known.map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra, 1)},`);
  const [imports, key] = hasKey ? ["import os\n\n", 'os.environ["QUIRE_API_KEY"]'] : ["", '"none"'];
  return `${imports}from openai import OpenAI  # pip install openai

client = OpenAI(base_url=${python(apiUrl(), 0)}, api_key=${key})
answer = client.chat.completions.create(
${lines.join("\n")}
)
print(answer.choices[0].message.content)`;
}

function asJavaScript(body, hasKey) {
  const key = hasKey ? "\n    Authorization: `Bearer ${process.env.QUIRE_API_KEY}`," : "";
  return `const reply = await fetch(${JSON.stringify(`${apiUrl()}/chat/completions`)}, {
  method: "POST",
  headers: {${key}
    "Content-Type": "application/json",
  },
  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),
});
const answer = await reply.json();
console.log(answer.choices[0].message.content);`;
}

/** A value of JSON as Python writes it. */
function python(value, depth) {
  const [inner, outer] = ["    ".repeat(depth + 1), "    ".repeat(depth)];
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const parts = Array.isArray(value) ? value.map((one) => python(one, depth + 1))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const flat = `${open}${parts.join(", ")}${close}`;
  return flat.length < 76 && !flat.includes("\n") ? flat : `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${outer}${close}`;
}

/** The dialog that shows it. */
class RequestDialog {
  constructor() {
    this.dialog = byId("request");
    this.language = "curl";
    byId("languages").replaceChildren(...Object.keys(LANGUAGES).map((name) => {
      const choice = element("button", { type: "button", "aria-pressed": "false" }, name);
      choice.addEventListener("click", () => this.#choose(name));
      return choice;
    }));
    byId("request-copy").addEventListener("click", () => copyFrom(byId("request-copy"), byId("request-code").textContent));
    this.dialog.addEventListener("click", (event) => event.target === this.dialog && this.dialog.close());
  }

  /** body: as it is to be shown. */
  open(body) {
    this.body = body;
    this.#choose(this.language);
    this.dialog.showModal();
  }

  /** Colours may come later. */
  draw() {
    if (this.body) this.#choose(this.language);
  }

  #choose(language) {
    this.language = language;
    for (const choice of byId("languages").children) choice.setAttribute("aria-pressed", String(choice.textContent === language));
    const { name, write } = LANGUAGES[language];
    byId("request-code").replaceChildren(...coloured(write(this.body, Boolean(sessionStorage.getItem(KEY_NAME))), name));
  }
}
