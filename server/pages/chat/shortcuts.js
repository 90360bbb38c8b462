
// Keys for what the mouse does. `?` shows them.

const IS_MAC = /Mac|iPhone|iPad/.test(navigator.platform);
const MOD = IS_MAC ? "⌘" : "Ctrl";
// keys: as they are shown; isFree: only outside fields of text
const SHORTCUTS = [
  { keys: ["Enter"], what: "Send the message" },
  { keys: ["Shift", "Enter"], what: "New line" },
  { keys: ["Esc"], what: "Stop the answer; close what is open" },
  { keys: ["↑"], what: "Edit the last message, from an empty box", act: "edit", test: (event) => event.key === "ArrowUp" && event.target.id === "input" && !event.target.value },
  { keys: ["/"], what: "Write a message", act: "write", isFree: true, test: (event) => event.key === "/" },
  { keys: [MOD, "K"], what: "Search the chats", act: "search", test: (event) => hasMod(event) && !event.shiftKey && event.key.toLowerCase() === "k" },
  { keys: [MOD, "Shift", "O"], what: "New chat", act: "create", test: (event) => hasMod(event) && event.shiftKey && event.key.toLowerCase() === "o" },
  { keys: [MOD, "Shift", "Y"], what: "Copy the last answer", act: "copy", test: (event) => hasMod(event) && event.shiftKey && event.key.toLowerCase() === "y" },
  { keys: [MOD, ","], what: "Settings", act: "settings", test: (event) => hasMod(event) && event.key === "," },
  { keys: ["?"], what: "These keys", act: "help", isFree: true, test: (event) => event.key === "?" },
];

function hasMod({ ctrlKey, metaKey, altKey }) {
  return (IS_MAC ? metaKey : ctrlKey) && !altKey;
}

/** acts: by name, what a key does; one that returns false did nothing. */
function bindShortcuts(acts) {
  byId("shortcut-list").replaceChildren(...SHORTCUTS.flatMap(({ keys, what }) =>
    [element("dt", {}, ...keys.flatMap((key, i) => (i ? [" ", element("kbd", {}, key)] : [element("kbd", {}, key)]))), element("dd", {}, what)]));
  addEventListener("keydown", (event) => {
    if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    const isField = event.target.closest?.("input, textarea, select");
    const found = SHORTCUTS.find(({ test, isFree }) => test?.(event) && !(isFree && (isField || event.ctrlKey || event.metaKey || event.altKey)));
    if (found && acts[found.act]() !== false) event.preventDefault();
  });
}
