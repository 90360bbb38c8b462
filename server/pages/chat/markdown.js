
// Markdown of a model's answer as DOM nodes. marked only cuts the text into tokens; no HTML is ever made of it, so tags in
// an answer are text, and images and addresses other than http, https and mailto are not followed.

const MAX_DEPTH = 24; // of lists, quotes and emphasis within each other
const MAX_MARKS = 2000; // in one paragraph: some take time with the square of their number

class Rules extends marked.Tokenizer {
  /** A line of dashes under a line of text is a rule: what stands above it must not become a heading afterwards. */
  lheading() {}

  /** Tags are text wherever they stand. */
  html() {}

  tag() {}
}

/** What is nested too deeply or is nothing but marks, as of a model that repeats itself, is plain text. */
class Lexer extends marked.Lexer {
  depth = 0;

  blockTokens(text, tokens = [], isClipped = false) {
    return this.#bounded(text, tokens, 0, () => super.blockTokens(text, tokens, isClipped));
  }

  inlineTokens(text, tokens = []) {
    return this.#bounded(text, tokens, text.match(/[*_~`[\]<&\\!:@$]/g)?.length ?? 0, () => super.inlineTokens(text, tokens));
  }

  #bounded(text, tokens, numMarks, cut) {
    if (this.depth >= MAX_DEPTH || numMarks > MAX_MARKS) {
      tokens.push({ type: "text", raw: text, text });
      return tokens;
    }
    this.depth += 1;
    try {
      return cut();
    } finally {
      this.depth -= 1;
    }
  }
}

function blocksOf(text) {
  return new Lexer({ ...marked.getDefaults(), breaks: true, tokenizer: new Rules(), extensions: MATH_RULES }).lex(text);
}

const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", deg: "°",
  hellip: "…", mdash: "—", ndash: "–", times: "×", divide: "÷", middot: "·", bull: "•", larr: "←", rarr: "→", le: "≤", ge: "≥",
  ne: "≠", plusmn: "±", micro: "µ", euro: "€", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”", laquo: "«", raquo: "»" };

/** What an answer shows, kept up to date while the text grows. */
class Markdown {
  constructor(root) {
    this.root = root;
    this.blocks = []; // { raw, node } of what is shown, in order
    this.numSettled = 0; // blocks that more text cannot change
    this.settledLength = 0; // the length of their text
    this.numTaken = 0;
    this.isWhole = false;
  }

  /** Show the text. Unless it is whole, what may still turn out to mean something else is held back. */
  show(text, isWhole) {
    text = text.replace(/\r\n?/g, "\n");
    this.isWhole = isWhole;
    if (isWhole) this.numSettled = this.settledLength = 0; // definitions of links may come last
    const rest = text.slice(this.settledLength);
    const tokens = blocksOf(isWhole ? rest : steady(rest));
    const blocks = tokens.filter(({ type }) => type !== "space" && type !== "def");
    blocks.forEach((token, i) => this.#put(this.numSettled + i, token));
    while (this.blocks.length > this.numSettled + blocks.length) this.blocks.pop().node.remove();
    if (!isWhole) this.#settle(tokens);
  }

  /** Draw all of it anew. */
  again(text, isWhole) {
    this.blocks = [];
    this.numSettled = this.settledLength = 0;
    this.root.replaceChildren();
    this.show(text, isWhole);
  }

  /** What no more text can change, and was not taken before: to be read aloud. */
  takeSettled() {
    const end = this.isWhole ? this.blocks.length : this.numSettled;
    const taken = this.blocks.slice(this.numTaken, end).map(({ node }) => node.textContent);
    this.numTaken = Math.max(this.numTaken, end);
    return taken;
  }

  #put(index, token) {
    const have = this.blocks[index];
    if (have?.raw === token.raw) return;
    const node = blockNode(token);
    if (!have) this.root.append(node);
    else if (have.node.cloneNode(false).isEqualNode(node.cloneNode(false))) {
      morph(have.node, node);
      have.raw = token.raw;
      return;
    } else have.node.replaceWith(node);
    this.blocks[index] = { raw: token.raw, node };
  }

  /** Only the last two tokens can change; the rest needs no second look. */
  #settle(tokens) {
    for (const token of tokens.slice(0, -2)) {
      this.settledLength += token.raw.length;
      if (token.type !== "space" && token.type !== "def") this.numSettled += 1;
    }
  }
}

/** Cut a text that still grows before what is undecided, and close what is open, so that nothing shown has to change. */
function steady(text) {
  let fence = null;
  for (const [, mark, info] of text.matchAll(/^(?:[\s>]|[-*+] |\d{1,9}[.)] )*(`{3,}|~{3,})([^\n]*)\n/gm)) {
    if (!fence) fence = info.includes("`") ? null : mark;
    else if (mark.startsWith(fence) && !info.trim()) fence = null;
  }
  const start = text.lastIndexOf("\n") + 1;
  const line = text.slice(start);
  if (fence) return /^[\s>]*[`~]+\s*$/.test(line) ? text.slice(0, start) : text;
  const mayBegin = // a list, a rule, a heading, a row of a table, a task, a fence
    /^[\s\-+*=_#>|`~:.)\d\\]*(?:\[[ xX]?\]?\s*)?$/.test(line) || /^(?:[\s>]|[-*+] |\d{1,9}[.)] )*(?:`{3,}|~{3,})[^`]*$/.test(line);
  return closed(withoutHalfMath(withoutHalfTable(mayBegin ? text.slice(0, start) : text)));
}

/** A table's head is shown once the line under it is whole. */
function withoutHalfTable(text) {
  const lines = text.replace(/\n$/, "").split("\n");
  if (!/^\s*\|/.test(lines.at(-1)) || /^\s*\|/.test(lines.at(-2) ?? "")) return text;
  return lines.slice(0, -1).map((line) => `${line}\n`).join("");
}

/** Close emphasis and code that the last line leaves open, and leave out half a link, a character's half name, half a mark. */
function closed(text) {
  const start = text.lastIndexOf("\n") + 1;
  const plain = withoutMath(text.slice(start))
    .replace(/!?\[[^\][]{0,200}(?:\]|\]\([^()\s]{0,2000})?$/, "")
    .replace(/(?:&#?\w{0,8}|<(?:b(?:r ?\/?)?)?)$/i, "")
    .replace(/[*_~`\\]+$/, "");
  const line = text.slice(start, start + plain.length);
  const open = [];
  const marks = /\\.|(`+)|\*{1,3}|_{1,3}|~~/g;
  for (let match = marks.exec(plain); match; match = marks.exec(plain)) {
    const [mark, code] = match;
    if (code) {
      const end = plain.slice(marks.lastIndex).search(new RegExp(`(?<!\`)${code}(?!\`)`));
      if (end < 0) {
        open.push(code);
        break;
      }
      marks.lastIndex += end + code.length;
    } else if (mark[0] !== "\\") {
      const before = plain[match.index - 1] ?? " ";
      if (open.at(-1) === mark && !/\s/.test(before)) open.pop();
      else if (/\S/.test(plain[marks.lastIndex] ?? " ") && !/\w/.test(before)) open.push(mark);
    }
  }
  return text.slice(0, start) + (open.length ? line.trimEnd() + open.toReversed().join("") : line);
}

function blockNode(token) {
  switch (token.type) {
    case "paragraph": return element("p", {}, ...inline(token.tokens));
    case "heading": return element(`h${Math.min(6, token.depth + 1)}`, {}, ...inline(token.tokens));
    case "code": return codeNode(token);
    case "blockquote": return element("blockquote", {}, ...token.tokens.filter(isShown).map(blockNode));
    case "list": return listNode(token);
    case "table": return tableNode(token);
    case "math": return mathNode(token);
    case "hr": return element("hr");
    case "text": return element("p", {}, ...(token.tokens ? inline(token.tokens) : [decoded(token.text)]));
    default: return element("p", {}, token.raw ?? "");
  }
}

function isShown({ type }) {
  return type !== "space" && type !== "def" && type !== "checkbox";
}

function codeNode({ text, lang }) {
  const copy = element("button", { type: "button", class: "copy", "data-copy": "code" }, icon("copy"), "Copy");
  const language = (lang ?? "").split(/\s/)[0];
  const head = element("div", { class: "code-head" }, element("span", {}, language || "text"), copy);
  // reachable by keyboard, so that it can be scrolled
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, element("code", {}, ...coloured(text, language))));
}

function listNode(token) {
  const items = token.items.map((item) => {
    const box = item.task ? [element("input", { type: "checkbox", disabled: true, checked: Boolean(item.checked), "aria-label": "task" })] : [];
    const blocks = item.tokens.filter(isShown).map(blockNode);
    if (box.length && blocks[0]?.tagName === "P") blocks[0].prepend(...box.splice(0), " ");
    return element("li", { class: item.task ? "task" : undefined }, ...box, ...blocks);
  });
  const start = token.ordered && token.start !== 1 && token.start !== "" ? String(token.start) : undefined;
  return element(token.ordered ? "ol" : "ul", { start }, ...items);
}

/** A cell with a sentence has a least width, else a wide table squeezes it to a word a line. */
function tableNode({ header, align, rows }) {
  const classOf = (text, side) => [side && `to-${side}`, text.length > 24 && "long"].filter(Boolean).join(" ") || undefined;
  const cells = (row, tag) => row.map((cell, i) =>
    element(tag, { class: classOf(cell.text, align[i]) }, ...inline(cell.tokens)));
  const head = element("thead", {}, element("tr", {}, ...cells(header, "th")));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row, "td"))));
  return element("div", { class: "table", tabindex: "0" }, element("table", {}, head, body));
}

function inline(tokens) {
  return (tokens ?? []).flatMap((token) => {
    switch (token.type) {
      case "strong": return element("strong", {}, ...inline(token.tokens));
      case "em": return element("em", {}, ...inline(token.tokens));
      case "del": return element("del", {}, ...inline(token.tokens));
      case "codespan": return element("code", {}, token.text);
      case "math": return mathNode(token);
      case "br": return element("br");
      case "link": return linkNode(token.href, inline(token.tokens), token.title);
      case "image": return linkNode(token.href, [`Image: ${token.text || token.href}`], token.title);
      case "escape": return token.text;
      case "checkbox": return [];
      case "text": return token.tokens ? inline(token.tokens) : withBreaks(decoded(token.text));
      default: return token.raw ?? "";
    }
  });
}

/** The one tag that models need: cells of tables have no other way to break a line. */
function withBreaks(text) {
  return text.split(/<br ?\/?>/i).flatMap((part, i) => (i ? [element("br"), part] : [part])).filter((part) => part !== "");
}

function linkNode(href, children, title) {
  let address = null;
  try {
    address = new URL(decoded(href)); // a relative address would lead somewhere on this server
  } catch {
    return children;
  }
  if (!["http:", "https:", "mailto:"].includes(address.protocol)) return children;
  return element("a", { href: address.href, target: "_blank", rel: "noopener noreferrer nofollow", title: title || undefined }, ...children);
}

function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,8}));/gi, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(NAMED, name) ? NAMED[name] : whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code < 0x110000 && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : "\ufffd";
  });
}
