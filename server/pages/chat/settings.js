
// The panel of settings, the choice of the model, and the dialog for the key.

// One that the demo model was taught: ask it for the weather in Paris.
const EXAMPLE = [{ type: "function", function: { name: "get_weather", description: "Get the weather of a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];

/** What a request takes from the panel. on: { change() }. */
class Settings {
  constructor(on) {
    this.on = on;
    this.values = loadSettings();
    this.form = byId("settings-form");
    this.models = [];
    this.#fill();
    this.form.addEventListener("input", () => this.#read());
    byId("settings-button").addEventListener("click", () => this.open());
    byId("example").addEventListener("click", () => {
      byId("tools").value = JSON.stringify(EXAMPLE, null, 2);
      this.#read();
    });
    byId("reset").addEventListener("click", () => this.#reset());
    byId("model").addEventListener("change", () => this.#set("model", byId("model").value));
    // Only a valid panel closes by its buttons; Escape always does, and what is wrong is then left as it was.
    byId("settings").addEventListener("close", () => this.#fill());
    byId("settings").addEventListener("click", (event) => {
      if (event.target === byId("settings")) byId("settings").close();
    });
  }

  open() {
    byId("settings").showModal();
    this.#learnThinking();
  }

  /** Read the served models. Throws a ServerError. */
  async loadModels() {
    const { data } = await (await ask("v1/models")).json();
    this.models = data;
    const names = data.map(({ id }) => id);
    byId("model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    if (!names.includes(this.values.model)) this.values.model = names[0] ?? "";
    byId("model").value = this.values.model;
    byId("model").disabled = names.length < 2;
    this.on.change();
  }

  get model() {
    return this.models.find(({ id }) => id === this.values.model) ?? null;
  }

  #set(name, value) {
    this.values[name] = value;
    saveSettings(this.values);
    this.#show();
    this.on.change();
  }

  #fields() {
    return [...this.form.elements].filter(({ name }) => name);
  }

  #fill() {
    for (const field of this.#fields()) field.value = this.values[field.name];
    this.#check();
    this.#show();
  }

  #read() {
    this.#check();
    for (const field of this.#fields()) {
      if (field.validity.valid) this.values[field.name] = field.value;
    }
    saveSettings(this.values);
    this.#show();
  }

  #check() {
    const note = byId("tools-note");
    let problem = "";
    try {
      const tools = parseTools(byId("tools").value);
      setText(note, tools.length ? `${count(tools.length, "tool")}: the model may call, you type the results.` : "The model may call them; you type their results.");
    } catch (error) {
      problem = error.message;
      setText(note, problem);
    }
    note.classList.toggle("wrong", Boolean(problem));
    byId("tools").setCustomValidity(problem);
  }

  #show() {
    const { model, theme, ...others } = this.values;
    document.documentElement.dataset.theme = theme;
    byId("changed").hidden = Object.values(others).every((value) => !value.trim());
  }

  #reset() {
    for (const name of Object.keys(DEFAULTS)) if (name !== "model") this.values[name] = DEFAULTS[name];
    saveSettings(this.values);
    this.#fill();
  }

  /** Rendering a prompt generates nothing, and its headers say whether the template reads the field. */
  async #learnThinking() {
    const name = this.values.model;
    if (this.learnt === name) return;
    try {
      const body = { model: name, messages: [{ role: "user", content: "?" }], reasoning_effort: "none" };
      const reply = await ask("v1/chat/completions/render", { body });
      byId("thinking-note").hidden = !(reply.headers.get("x-quire-ignored") ?? "").includes("reasoning_effort");
      this.learnt = name;
    } catch {
      byId("thinking-note").hidden = true; // asked again when the panel is next opened
    }
  }
}

/** Ask for the key, until one is given. wasWrong: there was one, and the server refused it. */
async function askForKey(wasWrong) {
  const dialog = byId("key-dialog");
  setText(byId("key-note"), wasWrong ? "The server does not know this key." : "It stays in this tab and is sent to this server alone.");
  byId("key-note").classList.toggle("wrong", wasWrong);
  byId("key").value = "";
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const key = byId("key").value.trim();
  if (key) sessionStorage.setItem(KEY_NAME, key);
  return Boolean(key);
}
