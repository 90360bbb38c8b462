
// Small things on which the rest of the page stands. Text becomes text nodes here, never markup.

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "m5 12.5 4.5 4.5L19 7.5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  retry: "M20 12a8 8 0 1 1-2.5-5.8M20 3v4.5h-4.5",
  trash: "M4 7h16M9 7V4h6v3M6.5 7l1 13h9l1-13M10 11v5M14 11v5",
  send: "M12 19V5M5.5 11.5 12 5l6.5 6.5",
  stop: "M7 7h10v10H7z",
  tool: "M14.5 6.5a4 4 0 0 0-5.2 5.2L4 17l3 3 5.3-5.3a4 4 0 0 0 5.2-5.2L15 12l-3-3z",
  chevron: "m9 6 6 6-6 6",
  code: "m9 7-5 5 5 5M15 7l5 5-5 5",
  go: "M6 5v14l11-7z",
  words: "M5 20V10M12 20V4M19 20v-7",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
  close: "m6 6 12 12M18 6 6 18",
  warning: "M12 4 2.5 20h19zM12 10v4.5M12 17v.5",
};

function byId(id) {
  return document.getElementById(id);
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function icon(name) {
  const made = document.createElementNS(SVG, "svg");
  made.setAttribute("viewBox", "0 0 24 24");
  made.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  made.append(path);
  return made;
}

/** A button with an icon. Its label is what it is called, and its tooltip. */
function iconButton(name, label, onClick) {
  const made = element("button", { type: "button", class: "icon", "aria-label": label, title: label }, icon(name));
  if (onClick) made.addEventListener("click", onClick);
  return made;
}

/** crypto.randomUUID is missing on plain HTTP from another machine. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without HTTPS there is no clipboard object, but the old command.
    const area = element("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    if (!isCopied) return false;
  }
  return true;
}

/** Copy, and say so on the button for a moment. */
async function copyFrom(button, text) {
  if (!(await copyText(text))) return say("The browser did not allow copying.");
  const shown = [...button.childNodes];
  button.replaceChildren(icon("check"), ...(button.textContent.trim() ? [document.createTextNode("Copied")] : []));
  say("Copied");
  setTimeout(() => button.replaceChildren(...shown), 1400);
}

/** Tell those who hear the page. */
function say(text) {
  byId("said").append(element("p", {}, text));
  while (byId("said").childElementCount > 20) byId("said").firstElementChild.remove();
}

/** Make `old` equal to `fresh`, and leave what is equal alone: selections, focus and scrolling in it stay. */
function morph(old, fresh) {
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, i) => {
    const have = old.childNodes[i];
    if (!have) old.append(node);
    else if (have.isEqualNode(node)) return;
    else if (have.nodeType === Node.TEXT_NODE && node.nodeType === Node.TEXT_NODE) setData(have, node.data);
    else if (have.cloneNode(false).isEqualNode(node.cloneNode(false))) morph(have, node);
    else have.replaceWith(node);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

/** A text that only grew is added to, so that a selection in it stays. */
function setData(node, text) {
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
