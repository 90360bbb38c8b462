
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
    byId("no-chats").hidden = chats.length > 0;
    byId("export").hidden = byId("clear").hidden = !chats.length;
    const fresh = element("ul", {}, ...chats.map((chat) => chatItem(chat, chat.id === currentId)));
    morph(byId("chats"), fresh);
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

function chatItem({ id, title }, isCurrent) {
  const name = title || "New chat";
  const remove = iconButton("trash", `Delete: ${name}`);
  remove.dataset.act = "delete";
  return element("li", { "data-id": id },
    element("button", { type: "button", class: "chat", "aria-current": isCurrent ? "page" : undefined, title: name }, name), remove);
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
