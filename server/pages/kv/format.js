
// How numbers, names and colours are written. Nothing here touches the page.

const STEPS = ["B", "KiB", "MiB", "GiB", "TiB"];

function count(number) {
  return number.toLocaleString("en-US");
}

function bytes(number) {
  let step = 0;
  while (number >= 1024 && step < STEPS.length - 1) {
    number /= 1024;
    step += 1;
  }
  return `${step && number < 100 ? number.toFixed(1) : Math.round(number)} ${STEPS[step]}`;
}

/** Never 100 % of what is not full, nor 0 % of what is not empty. */
function percent(part, whole) {
  if (!whole) return "–";
  const exact = (100 * part) / whole;
  if (part && exact < 0.1) return "<0.1%";
  if (exact >= 99.95 && part < whole) return "99.9%";
  return exact < 10 ? `${exact.toFixed(1)}%` : `${exact.toFixed(exact < 99.5 ? 0 : part < whole ? 1 : 0)}%`;
}

function age(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")} min`;
}

/** One choice of a request in parts: `chatcmpl-`, `1f03ab…9c001`, and ` ·1` for its second choice. */
function partsOf({ id, index }) {
  const end = id.indexOf("-") + 1;
  const rest = id.slice(end);
  return [id.slice(0, end), rest.length > 14 ? `${rest.slice(0, 6)}…${rest.slice(-5)}` : rest, index ? ` ·${index}` : ""];
}

function nameOf(request) {
  return partsOf(request).join("");
}

function keyOf(request) {
  return `${request.id}#${request.index}`;
}

/** FNV-1a, and a last mix: ids that differ in one character get colours far apart. */
function hash(text) {
  let value = 0x811c9dc5;
  for (let i = 0; i < text.length; i += 1) value = Math.imul(value ^ text.charCodeAt(i), 0x01000193);
  value = Math.imul(value ^ (value >>> 15), 0x2c1b3c6d);
  return (value ^ (value >>> 13)) >>> 0;
}

const NUM_HUES = 24;

/** A request's colour, by its code in a ColourBook: even in lightness and chroma, so that none shouts. */
function colourOf(code, isDark) {
  const hue = ((code % NUM_HUES) * 360) / NUM_HUES;
  const level = Math.floor(code / NUM_HUES);
  return isDark ? `oklch(${0.58 + 0.07 * level} 0.1 ${hue})` : `oklch(${0.58 + 0.07 * level} 0.108 ${hue})`;
}

/** Which request has which colour while it lives: by its hash, or the next hue that fewer have. */
class ColourBook {
  constructor() {
    this.codes = new Map(); // by key
    this.counts = new Array(NUM_HUES).fill(0);
  }

  /** Forget those that ended, and find colours for those that are new. */
  keep(keys) {
    const live = new Set(keys);
    for (const [key, code] of this.codes) {
      if (live.has(key)) continue;
      this.codes.delete(key);
      this.counts[code % NUM_HUES] -= 1;
    }
    for (const key of live) if (!this.codes.has(key)) this.#add(key);
  }

  #add(key) {
    const fewest = Math.min(...this.counts);
    let hue = hash(key) % NUM_HUES;
    while (this.counts[hue] > fewest) hue = (hue + 7) % NUM_HUES; // 7 and 24 share no factor, so all are tried
    this.codes.set(key, hue + NUM_HUES * ((hue + this.counts[hue]) % 3)); // neighbouring hues differ in lightness
    this.counts[hue] += 1;
  }
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

/** Write a text only where it changed: most of 500 rows stay as they are. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
