
// How sure the model was of each word: asked for with the answer, kept as long as the page is open, shown under the pointer.

const NUM_TOPS = 5;
const UNSURE = { unsure: 0.9, doubtful: 0.5 }; // below which probability a word gets which mark
const canMark = "highlights" in CSS;
const probabilities = new WeakMap(); // answer → its tokens, [{ text, bytes, p, tops }]

/** Keep the log-probabilities of a chunk. */
function takeWords(answer, logprobs) {
  if (!logprobs?.content?.length) return;
  if (!probabilities.has(answer)) probabilities.set(answer, []);
  for (const { token, bytes, logprob, top_logprobs: tops } of logprobs.content) {
    probabilities.get(answer).push({ text: token, bytes: bytes ?? [...new TextEncoder().encode(token)], p: Math.exp(logprob),
      tops: (tops ?? []).map((top) => ({ text: top.token, p: Math.exp(top.logprob) })) });
  }
}

/** The tokens of an answer's text: [{ start, end, token }], places in it. Empty where they do not make up the text. */
function placesOf(answer) {
  const tokens = probabilities.get(answer) ?? [];
  const latin = (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  const joined = tokens.map(({ bytes }) => latin(bytes)).join("");
  const content = latin(new TextEncoder().encode(answer.content));
  const shift = joined.lastIndexOf(content); // thoughts and tags come before it
  if (shift < 0 || !content) return [];
  const toPlace = new Int32Array(content.length + 1); // by byte
  let byte = 0;
  let place = 0;
  for (const character of answer.content) {
    const size = new TextEncoder().encode(character).length;
    toPlace.fill(place, byte, byte + size);
    byte += size;
    place += character.length;
  }
  toPlace[byte] = place;
  const found = [];
  let end = -shift;
  for (const token of tokens) {
    const start = end;
    end += token.bytes.length;
    if (end > 0 && start < content.length) found.push({ start: toPlace[Math.max(start, 0)], end: toPlace[Math.min(end, content.length)], token });
  }
  return found;
}

/** Where each piece of drawn text stands in the text as the model wrote it: [{ node, offset, length, place }]. */
function piecesOf(root, source) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT, {
    acceptNode: (node) => node.parentElement.closest(".code-head, .math") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT });
  const pieces = [];
  let from = 0;
  while (walker.nextNode()) {
    for (const { 0: piece, index } of walker.currentNode.data.matchAll(/[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu)) {
      const place = source.indexOf(piece, from);
      if (place < 0 || place - from > (/[\p{L}\p{N}]/u.test(piece) ? 600 : 4)) continue;
      pieces.push({ node: walker.currentNode, offset: index, length: piece.length, place });
      from = place + piece.length;
    }
  }
  return pieces;
}

/** Shows the words of the answers in a list. */
class Words {
  constructor(root) {
    this.root = root;
    this.tip = element("div", { id: "word", class: "tip", role: "status", hidden: true });
    document.body.append(this.tip);
    this.maps = new WeakMap(); // answer → { tokens, pieces, length }
    root.addEventListener("pointermove", (event) => event.pointerType !== "touch" && this.#pointAt(event));
    root.addEventListener("pointerleave", () => this.hide());
    root.addEventListener("click", (event) => this.node && this.#pointAt(event));
    root.addEventListener("keydown", (event) => this.#press(event));
    byId("scroll").addEventListener("scroll", () => this.hide(), { passive: true });
  }

  /** Mark the unsure words of an answer, or no longer. Return whether they are marked now. */
  toggle(answer, text) {
    const isOn = this.node !== text;
    this.clear();
    if (!isOn) return false;
    this.node = text;
    this.answer = answer;
    this.place = -1;
    const { tokens } = this.#mapOf(answer, text);
    if (canMark) {
      const ranges = Object.fromEntries(Object.keys(UNSURE).map((name) => [name, []]));
      for (const one of tokens) {
        const name = one.token.p < UNSURE.doubtful ? "doubtful" : one.token.p < UNSURE.unsure ? "unsure" : null;
        if (name) ranges[name].push(...this.#rangesOf(one, answer, text));
      }
      for (const [name, list] of Object.entries(ranges)) CSS.highlights.set(name, new Highlight(...list));
    }
    text.tabIndex = -1;
    text.focus({ preventScroll: true });
    return true;
  }

  clear() {
    this.hide();
    this.node?.removeAttribute("tabindex");
    this.node = this.answer = null;
    if (canMark) for (const name of Object.keys(UNSURE)) CSS.highlights.delete(name);
  }

  hide() {
    this.tip.hidden = true;
    this.shown = null;
    if (canMark) CSS.highlights.delete("word");
  }

  #mapOf(answer, text) {
    const length = text.textContent.length;
    const known = this.maps.get(answer);
    const isWhole = known?.length === length && known.pieces[0]?.node.isConnected;
    if (!isWhole) this.maps.set(answer, { length, tokens: placesOf(answer), pieces: piecesOf(text, answer.content) });
    return this.maps.get(answer);
  }

  #rangesOf({ start, end }, answer, text) {
    const ranges = [];
    for (const { node, offset, length, place } of this.#mapOf(answer, text).pieces) {
      if (place + length <= start || place >= end) continue;
      const range = new Range();
      range.setStart(node, offset + Math.max(start - place, 0));
      range.setEnd(node, offset + Math.min(end - place, length));
      ranges.push(range);
    }
    return ranges;
  }

  #pointAt(event) {
    const view = event.target.closest?.(".assistant:not(.running)")?.view;
    const text = event.target.closest?.(".text");
    if (!view || !text || !probabilities.has(view.answer)) return this.hide();
    const caret = caretAt(event.clientX, event.clientY);
    const { pieces, tokens } = this.#mapOf(view.answer, text);
    const piece = caret && pieces.find(({ node, offset, length }) => node === caret.node && caret.offset >= offset && caret.offset <= offset + length);
    if (!piece) return this.hide();
    // between two letters the caret is before the second: the one under the pointer is that of which the box holds it
    const places = [caret.offset - 1, caret.offset].map((offset) => piece.place + offset - piece.offset);
    const under = places.map((place) => tokens.find(({ start, end }) => place >= start && place < end)).filter(Boolean)
      .find((one) => this.#rangesOf(one, view.answer, text).some((range) => [...range.getClientRects()].some((box) => isIn(box, event))));
    if (under) this.#show(under, view.answer, text);
    else this.hide();
  }

  #show(one, answer, text) {
    if (this.shown === one) return;
    const ranges = this.#rangesOf(one, answer, text);
    if (!ranges.length) return;
    this.shown = one;
    if (canMark) CSS.highlights.set("word", new Highlight(...ranges));
    const { token } = one;
    const tops = token.tops.some(({ text: top }) => top === token.text) ? token.tops : [{ text: token.text, p: token.p }, ...token.tops];
    this.tip.replaceChildren(element("p", {}, element("b", {}, `${quoted(token.text)} `), `${chance(token.p)}`),
      element("ol", {}, ...tops.map((top) => topNode(top, top.text === token.text))));
    this.tip.hidden = false;
    const box = ranges[0].getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const isAbove = box.top > height + 12;
    this.tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    this.tip.style.top = `${isAbove ? box.top - height - 6 : box.bottom + 6}px`;
  }

  /** Arrows go from word to word while the unsure ones are marked. */
  #press(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!this.node || event.target !== this.node || !step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const { tokens } = this.#mapOf(this.answer, this.node);
    for (let next = this.place + step; next >= 0 && next < tokens.length; next += step) {
      if (!this.#rangesOf(tokens[next], this.answer, this.node).length) continue;
      this.place = next;
      this.shown = null;
      this.#show(tokens[next], this.answer, this.node);
      return;
    }
  }
}

function topNode({ text, p }, isChosen) {
  const meter = element("i", { class: "share" });
  meter.style.width = `${100 * p}%`;
  return element("li", { class: isChosen ? "chosen" : undefined }, element("code", {}, quoted(text)), element("span", {}, chance(p)), meter);
}

function quoted(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, (blanks) => "␣".repeat(blanks.length)) || "(nothing)";
}

/** Never 100 % of what was not certain, nor 0 % of what was possible. */
function chance(p) {
  const percent = 100 * p;
  if (percent < 0.01) return "< 0.01 %";
  if (percent > 99.99) return "> 99.99 %";
  return `${percent.toFixed(percent < 1 || percent > 99 ? 2 : 1)} %`;
}

function isIn({ left, right, top, bottom }, { clientX: x, clientY: y }) {
  return x >= left && x <= right && y >= top - 2 && y <= bottom + 2;
}

function caretAt(x, y) {
  if (document.caretPositionFromPoint) {
    const found = document.caretPositionFromPoint(x, y);
    return found && { node: found.offsetNode, offset: found.offset };
  }
  const found = document.caretRangeFromPoint?.(x, y);
  return found && { node: found.startContainer, offset: found.startOffset };
}
