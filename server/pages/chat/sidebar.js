
// The list of chats, and what can be done with all of them.

/** on: { open(id), create(), removed(id) }. */
class Sidebar {
  constructor(on) {
    this.on = on;
    byId("home").setAttribute("href", BASE || "./");
    byId("home").addEventListener("click", (event) => {
      event.preventDefault();
      on.create();
    });
    byId("kv").setAttribute("href", `${BASE}kv`);
    byId("docs").setAttribute("href", `${BASE}docs`);
    byId("new").addEventListener("click", () => on.create());
    byId("menu").addEventListener("click", () => this.toggle(true));
    byId("shade").addEventListener("click", () => this.toggle(false));
    byId("chats").addEventListener("click", (event) => this.#click(event));
    byId("export").addEventListener("click", exportChats);
    byId("clear").addEventListener("click", () => this.#clear());
    byId("clear").addEventListener("blur", () => setText(byId("clear"), "Clear"));
    byId("search").addEventListener("input", () => this.draw());
    byId("search").addEventListener("keydown", (event) => this.#search(event));
    // other tabs write to the same store
    addEventListener("storage", (event) => event.key?.startsWith(CHAT) && this.draw());
  }

  /** On narrow windows the list lies over the page. */
  toggle(isOpen) {
    document.body.classList.toggle("side-open", isOpen);
    byId("menu").setAttribute("aria-expanded", String(isOpen));
    if (isOpen) byId("new").focus();
  }

  draw(currentId = this.currentId) {
    this.currentId = currentId;
    const chats = loadChats();
    byId("search").hidden = chats.length < 2 && !byId("search").value;
    const wanted = byId("search").value.trim().toLowerCase();
    const found = wanted ? chats.map((chat) => ({ chat, line: lineWith(chat, wanted) })).filter(({ line }) => line !== null) : chats.map((chat) => ({ chat }));
    byId("no-chats").hidden = found.length > 0;
    setText(byId("no-chats"), chats.length ? "No chat has these words." : "Chats are kept in this browser alone.");
    byId("export").hidden = byId("clear").hidden = !chats.length;
    const fresh = element("ul", {}, ...found.map(({ chat, line }) => chatItem(chat, chat.id === currentId, line)));
    morph(byId("chats"), fresh);
  }

  /** Go to the search field, if there is one to search in. */
  search() {
    if (byId("search").hidden) return false;
    this.toggle(true);
    byId("search").select();
    byId("search").focus();
    return true;
  }

  #search(event) {
    if (event.key === "Escape" && byId("search").value) {
      event.stopPropagation();
      byId("search").value = "";
      this.draw();
    } else if (event.key === "Enter" || event.key === "ArrowDown") {
      event.preventDefault();
      byId("chats").querySelector(".chat")?.[event.key === "Enter" ? "click" : "focus"]();
    }
  }

  #click(event) {
    const button = event.target.closest("button");
    const id = button?.closest("li").dataset.id;
    if (!id) return;
    if (button.dataset.act !== "delete") return this.on.open(id);
    removeChat(id);
    this.on.removed(id);
  }

  #clear() {
    const chats = loadChats();
    const sure = `Delete ${count(chats.length, "chat")}?`;
    if (byId("clear").textContent !== sure) return setText(byId("clear"), sure);
    for (const { id } of chats) removeChat(id);
    setText(byId("clear"), "Clear");
    this.on.removed(null);
  }
}

/** The line of a chat in which words are, shortened around them; "": they are in its title; null: nowhere. */
function lineWith({ title, messages }, wanted) {
  if (title.toLowerCase().includes(wanted)) return "";
  for (const { content, files } of messages) {
    for (const text of [content, ...(files ?? []).flatMap((file) => [file.name, file.text])]) {
      const at = text.toLowerCase().indexOf(wanted);
      const start = at > 20 ? at - 12 : 0;
      if (at >= 0) return `${start ? "…" : ""}${text.slice(start, at + 60).replace(/\s+/g, " ")}`;
    }
  }
  return null;
}

function chatItem({ id, title }, isCurrent, line = "") {
  const name = title || "New chat";
  const remove = iconButton("trash", `Delete: ${name}`);
  remove.dataset.act = "delete";
  return element("li", { "data-id": id },
    element("button", { type: "button", class: "chat", "aria-current": isCurrent ? "page" : undefined, title: name },
      name, ...(line ? [element("span", { class: "line" }, line)] : [])), remove);
}

/** All chats as one JSON file. */
function exportChats() {
  const address = URL.createObjectURL(new Blob([JSON.stringify({ chats: loadChats() }, null, 2)], { type: "application/json" }));
  const link = element("a", { href: address, download: `quire-chats-${new Date().toISOString().slice(0, 10)}.json` });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
