
// The conversation as it is drawn: the user's messages, answers, and the results of tools.

class Conversation {
  /** on: { edit(id, text), retry(id), go(id), code(id), words(answer, node), unmark(), results(texts) }. */
  constructor(root, on) {
    this.root = root;
    this.on = on;
    this.views = new Map(); // id of an answer → AnswerView
    this.nodes = new Map(); // id of a message → what shows it
    root.addEventListener("click", (event) => this.#click(event));
  }

  /** Draw another chat. */
  open(messages) {
    this.views.clear();
    this.nodes.clear();
    this.root.replaceChildren();
    this.draw(messages);
  }

  /** Draw what is new, and remove what is gone. Return the view of the last message, if that is an answer. */
  draw(messages) {
    this.messages = messages;
    const wanted = new Set(messages.map((message) => this.#nodeOf(message)));
    for (const node of [...this.root.children]) if (!wanted.has(node)) node.remove();
    this.root.append(...[...wanted].filter((node) => !node.isConnected));
    this.drawResultForm();
    return this.views.get(messages.at(-1)?.id);
  }

  /** Ask for the results of the last answer's calls. */
  drawResultForm() {
    this.root.querySelector("form.results")?.remove();
    const last = this.messages.at(-1);
    if (last?.role === "assistant" && last.finish === "tool_calls" && last.calls.length) this.root.append(this.#resultForm(last.calls));
  }

  #nodeOf(message) {
    if (!this.nodes.has(message.id)) this.nodes.set(message.id, this.#made(message));
    return this.nodes.get(message.id);
  }

  #made(message) {
    if (message.role === "tool") return toolNode(message, this.messages);
    if (message.role === "user") return userNode(message);
    const view = new AnswerView(message);
    this.views.set(message.id, view);
    view.draw(true);
    return view.node;
  }

  #click(event) {
    const button = event.target.closest("button");
    if (!button) return;
    const id = button.closest("[data-id]")?.dataset.id;
    const message = this.messages.find((one) => one.id === id);
    if (button.dataset.copy === "code") copyFrom(button, button.closest(".code").querySelector("code").textContent);
    else if (button.dataset.act === "copy") copyFrom(button, message.content);
    else if (button.dataset.act === "retry") this.on.retry(id);
    else if (button.dataset.act === "go") this.on.go(id);
    else if (button.dataset.act === "code") this.on.code(id);
    else if (button.dataset.act === "words") this.#mark(button, id);
    else if (button.dataset.act === "edit") this.#edit(button.closest(".message"), message);
  }

  #mark(button, id) {
    const view = this.views.get(id);
    const isOn = this.on.words(view.answer, view.text);
    for (const other of this.root.querySelectorAll("[data-act=words]")) other.setAttribute("aria-pressed", String(isOn && other === button));
  }

  /** Mark no words. */
  unmark() {
    this.on.unmark();
    for (const button of this.root.querySelectorAll("[data-act=words]")) button.setAttribute("aria-pressed", "false");
  }

  /** Draw all answers anew. */
  redraw() {
    for (const view of this.views.values()) view.redraw();
  }

  /** Edit the user's last message. Return whether there is one. */
  editLast() {
    const last = this.messages.findLast(({ role }) => role === "user");
    if (last) this.#edit(this.nodes.get(last.id), last);
    return Boolean(last);
  }

  #edit(node, message) {
    const area = element("textarea", { "aria-label": "Edit the message", rows: "1" });
    const cancel = element("button", { type: "button" }, "Cancel");
    const form = element("form", { class: "edit" }, area,
      element("div", { class: "row" }, element("span", { class: "hint" }, "What follows it is answered anew."), cancel,
        element("button", { type: "submit", class: "primary" }, "Send")));
    const shown = [...node.childNodes];
    const close = () => {
      node.replaceChildren(...shown);
      node.querySelector("[data-act=edit]")?.focus();
    };
    area.value = message.content;
    cancel.addEventListener("click", close);
    onEnter(area, () => form.requestSubmit());
    area.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() || message.files?.length) this.on.edit(message.id, area.value);
    });
    node.replaceChildren(form);
    grow(area);
    area.focus();
  }

  #resultForm(calls) {
    const fields = calls.map(({ name }, i) => {
      const area = element("textarea", { id: `result-${i}`, rows: "2", spellcheck: "false", placeholder: '{"temperature": 21}' });
      return { area, nodes: [element("label", { for: `result-${i}` }, "Result of ", element("code", {}, name)), area] };
    });
    const form = element("form", { class: "results" },
      element("p", { class: "hint" }, "The model called a tool. This page runs none: type what it would return."),
      ...fields.flatMap(({ nodes }) => nodes),
      element("div", { class: "row" }, element("button", { type: "submit", class: "primary" }, "Send the result", calls.length > 1 ? "s" : "")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.on.results(fields.map(({ area }) => area.value));
    });
    for (const { area } of fields) onEnter(area, () => form.requestSubmit());
    return form;
  }
}

function userNode({ id, content, files }) {
  return element("article", { class: "message user", "aria-label": "Your message", "data-id": id },
    element("div", { class: "said" }, ...(files?.length ? [element("ul", { class: "chips" }, ...files.map((file) => chipNode(file)))] : []),
      ...(content ? [element("div", { class: "bubble" }, content)] : [])),
    element("div", { class: "foot" }, element("span", { class: "acts" }, actButton("copy", "Copy the message"), actButton("edit", "Edit the message"))));
}

function toolNode({ id, content, callId }, messages) {
  const call = messages.flatMap(({ calls }) => calls ?? []).find((one) => one.id === callId);
  return element("article", { class: "message tool", "aria-label": "Result of a tool", "data-id": id },
    element("details", {}, element("summary", {}, icon("chevron"), "Result of ", element("code", {}, call?.name ?? "a tool")),
      element("pre", { tabindex: "0" }, element("code", {}, pretty(content)))));
}

/** Enter sends, with Shift it is a new line. Enter that ends a composition (Japanese, Chinese) is neither. */
function onEnter(area, send) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    send();
  });
  area.addEventListener("input", () => grow(area));
}

/** As tall as its text; the style sheet says how tall at most. */
function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
