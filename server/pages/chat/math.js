
// Formulas: found in the text as \( \), \[ \], $ $ or $$ $$, and drawn as MathML by Temml.

const MAX_FORMULA = 4000; // characters of one with delimiters of its own
const MAX_DOLLAR = 300; // of one between single dollars, which are also prices
const CLOSE = { "\\[": "\\]", "\\(": "\\)", $$: "$$" };
const MATH_OPTIONS = { throwOnError: true, trust: false, maxExpand: 200, maxSize: [20, 20] };

/** Length of the formula between single dollars with which a text begins; 0: none, -1: what follows will tell. */
function dollarLength(text, isWhole) {
  const line = text.split("\n", 1)[0];
  const ends = isWhole || line.length < text.length;
  if (line.length === 1) return ends ? 0 : -1;
  if (/[\s$]/.test(line[1])) return 0;
  if (/^\$\d[\d.,]*(?:[\s–-]+(?:\$|[\p{L}(]{2})|[\p{L}%)]|\s*$)/u.test(line)) return ends || !/^\$[\d.,]*\s*$/.test(line) ? 0 : -1; // a price
  if (!ends && /^\$\d[\d.,]*[\s–-]*\S?$/.test(line)) return -1;
  for (let end = 1; end < Math.min(line.length, MAX_DOLLAR); end += 1) {
    if (line[end] === "\\") end += 1;
    else if (line[end] === "$" && !/\s/.test(line[end - 1])) {
      if (end + 1 === line.length && !ends) return -1;
      if (!/\d/.test(line[end + 1] ?? "")) return end + 1;
    }
  }
  return ends || line.length >= MAX_DOLLAR ? 0 : -1;
}

/** The formula with which a text begins, if it has delimiters of its own. */
function delimited(text) {
  const close = CLOSE[text.slice(0, 2)];
  if (!close) return null;
  const body = text.slice(2, MAX_FORMULA);
  for (const { 0: mark, index } of body.matchAll(/\\\\|\\[[\]()]|\$\$|\n[ \t]*\n/g)) {
    if (mark === close) return { raw: text.slice(0, index + 4), tex: body.slice(0, index).trim(), isDisplay: close !== "\\)" };
    if (mark.startsWith("\n")) return null; // a paragraph's end
  }
  return null;
}

function inlineMath(text) {
  const found = delimited(text);
  if (found?.tex) return { type: "math", ...found };
  if (found || text[0] !== "$") return undefined;
  const length = dollarLength(text, true);
  return length > 2 ? { type: "math", raw: text.slice(0, length), tex: text.slice(1, length - 1), isDisplay: false } : undefined;
}

function blockMath(text) {
  const indent = /^ {0,3}/.exec(text)[0];
  const found = delimited(text.slice(indent.length)) ?? environment(text.slice(indent.length));
  if (!found?.isDisplay || !found.tex) return undefined;
  const rest = /^[ \t]*[.,;]?[ \t]*(?:\n+|$)/.exec(text.slice(indent.length + found.raw.length));
  if (!rest) return undefined;
  return { type: "math", ...found, raw: indent + found.raw + rest[0], tail: rest[0].trim() };
}

function environment(text) {
  const found = /^\\begin\{((?:align|gather|equation|multline)(?:ed|at)?\*?)\}(?:(?!\n[ \t]*\n)[^])*?\\end\{\1\}/.exec(text.slice(0, MAX_FORMULA));
  return found && { raw: found[0], tex: found[0], isDisplay: true };
}

/** What marked takes as extensions of its grammar. */
const MATH_RULES = {
  block: [blockMath], inline: [inlineMath], startInline: [(text) => {
    const start = text.search(/\$|\\[([]/);
    return start < 0 ? undefined : start;
  }],
  startBlock: [], childTokens: {}, renderers: {},
};

/** A growing text without the formula that is not yet whole. Code in it is none. */
function withoutHalfMath(text) {
  const plain = withoutCode(text);
  let open = null;
  for (const { 0: mark, index } of plain.matchAll(/\\\\|\\[[\]()]|\$\$|\n[ \t]*\n|\\begin\{(?:align|gather|equation|multline)|\\end\{\w+\*?\}/g)) {
    if (mark.startsWith("\n")) open = null;
    else if (open) open = mark === open.close || (open.close === "\\end" && mark.startsWith("\\end")) ? null : open;
    else if (CLOSE[mark]) open = { close: CLOSE[mark], index };
    else if (mark.startsWith("\\begin")) open = { close: "\\end", index };
  }
  if (open && text.length - open.index < MAX_FORMULA) return text.slice(0, open.index);
  const start = text.lastIndexOf("\n") + 1;
  const begin = /^ {0,3}\\(?:b(?:e(?:g(?:in?(?:\{[a-z]*\*?)?)?)?)?)?$/.exec(plain.slice(start));
  if (begin) return text.slice(0, start);
  for (let at = plain.indexOf("$", start); at >= 0; at = plain.indexOf("$", at + 1)) {
    if (plain[at - 1] === "\\") continue;
    if (plain[at + 1] === "$") {
      at = plain.indexOf("$$", at + 2) + 1 || plain.length;
      continue;
    }
    const length = dollarLength(plain.slice(at), false);
    if (length < 0) return text.slice(0, at);
    at += Math.max(length - 1, 0);
  }
  return /(?<!\\)(?:\\\\)*\\$/.test(plain) ? text.slice(0, -1) : text;
}

/** Spaces in place of code, so that all other characters keep their places. */
function withoutCode(text) {
  const blank = (code) => code.replace(/[^\n]/g, " ");
  return text.replace(/^[ \t>]*(`{3,}|~{3,})[^\n]*\n[^]*?^[ \t>]*\1[`~]*[ \t]*$/gm, blank).replace(/(`+)(?!`)[^\n]*?[^`\n]\1(?!`)/g, blank);
}

/** Letters in place of formulas, so that nothing in them is taken for emphasis. */
function withoutMath(line) {
  let shown = "";
  for (let at = 0; at < line.length; ) {
    const raw = /^(?:\$|\\[([])/.test(line.slice(at, at + 2)) ? inlineMath(line.slice(at))?.raw : null;
    shown += raw ? "x".repeat(raw.length) : line[at];
    at += raw ? raw.length : 1;
  }
  return shown;
}

function mathNode({ raw, tex, isDisplay, tail = "" }) {
  const node = element("span", { class: isDisplay ? "math display" : "math", tabindex: isDisplay ? "0" : undefined });
  if (isDisplay) node.setAttribute("role", "group");
  if (isDisplay) node.setAttribute("aria-label", "Formula");
  if (!hasLibrary("temml", "temml")) return node.append(raw.trim()), node;
  try {
    temml.render(tex, node, { ...MATH_OPTIONS, displayMode: isDisplay });
    if (tail) node.append(tail);
  } catch {
    node.replaceChildren(element("code", {}, raw.trim())); // as it was written
  }
  return node;
}
