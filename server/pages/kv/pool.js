
// The map: one cell per block, in reading order.

const LARGEST_CELL = 22;
const LARGEST_CELL_OF_PHONES = 15;
const SMALLEST_CELL = 3;
const DIMMED = 0.16;
const SMALLEST_ZOOM = 240; // blocks

/** Colours of the style sheet, as the canvas needs them. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    shared: read("--shared"), stripe: read("--stripe"), held: read("--held"), cached: read("--cached"),
    empty: read("--empty"), line: read("--line"), dim: read("--dim"), text: read("--text"), isDark: read("--dark") === "1",
    known: new Map([[EMPTY, read("--empty")], [CACHED, read("--cached")], [SHARED, read("--shared")], ["held", read("--held")]]), // by paint
  };
}

/** Fit a canvas to its place on the page; return its context in CSS pixels. */
function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

/** Draw one cell. Shared ones have stripes where there is room for them. */
function drawCell(context, x, y, size, paint, colours) {
  if (!colours.known.has(paint)) colours.known.set(paint, colourOf(paint, colours.isDark));
  context.fillStyle = colours.known.get(paint);
  if (size < 7) {
    context.fillRect(x, y, size, size);
    return;
  }
  context.beginPath();
  context.roundRect(x, y, size, size, Math.min(3, size / 5));
  context.fill();
  if (paint === SHARED) {
    context.save();
    context.clip();
    context.strokeStyle = colours.stripe;
    context.lineWidth = Math.max(1, size / 9);
    context.beginPath();
    for (let at = 0.5; at < 2; at += 0.5) {
      context.moveTo(x - 1, y + at * size + 1);
      context.lineTo(x + at * size + 1, y - 1);
    }
    context.stroke();
    context.restore();
  }
}

class PoolMap {
  /** on: { point(block or 0), choose(block) }. Blocks are numbered from 1; 0: none. */
  constructor(canvas, on) {
    this.canvas = canvas;
    this.on = on;
    this.snapshot = null;
    this.drawn = null; // what each cell shows; null: all are to be drawn
    this.chosen = null; // one entry per block: 1 for those of the highlighted request
    this.cursor = 0;
    this.isQueued = false;
    this.isZoomed = false; // to the blocks that have content
    this.range = null; // of the blocks in sight: { first, num }
    this.colours = palette();
    this.width = 0;
    new ResizeObserver(() => this.redraw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.#pointAt(event));
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.moveTo(0));
    canvas.addEventListener("click", (event) => {
      this.#pointAt(event);
      if (this.cursor) this.on.choose(this.cursor);
    });
    canvas.addEventListener("keydown", (event) => this.#press(event));
    canvas.addEventListener("focus", () => canvas.matches(":focus-visible") && this.moveTo(this.cursor || this.range?.first || 1));
    canvas.addEventListener("blur", () => this.moveTo(0));
  }

  show(snapshot) {
    if (this.snapshot?.pool.num_blocks !== snapshot.pool.num_blocks) this.drawn = null;
    this.snapshot = snapshot;
    this.#setRange();
    this.#queue();
  }

  /** Show the blocks that have content alone, or the whole pool. */
  zoom(isZoomed) {
    this.isZoomed = isZoomed;
    this.range = null;
    if (this.snapshot) this.#setRange();
    this.moveTo(0);
    this.#queue();
  }

  /** The range moves in large steps, so that the map does not jump with each block. */
  #setRange() {
    const total = this.snapshot.pool.num_blocks;
    const used = this.isZoomed ? this.snapshot.used : null;
    let range = { first: 1, num: total };
    if (used) {
      const size = used.last - used.first + 1;
      const have = this.range;
      const fits = have && used.first >= have.first && used.last < have.first + have.num && have.num <= Math.max(SMALLEST_ZOOM, 4 * size);
      const num = Math.min(total, Math.max(SMALLEST_ZOOM, 2 * size));
      range = fits ? have : { first: Math.max(1, Math.min(used.first, total - num + 1)), num };
    }
    if (range.first === this.range?.first && range.num === this.range.num) return;
    this.range = range;
    this.drawn = null;
  }

  /** Highlight a request's blocks; null: none. */
  highlight(request) {
    this.chosen = null;
    if (request && this.snapshot) {
      this.chosen = new Uint8Array(this.snapshot.paint.length);
      for (const block of blocksOf(request.runs)) this.chosen[block] = 1;
    }
    this.#queue();
  }

  /** Draw everything anew: another size, other colours. */
  redraw() {
    this.colours = palette();
    this.drawn = null;
    this.#queue();
  }

  moveTo(block) {
    this.cursor = block;
    this.on.point(block);
  }

  /** Where a block is on the map: { x, y, size } in CSS pixels. */
  placeOf(block) {
    const { columns, pitch, size } = this.layout;
    const cell = block - this.range.first;
    return { x: Math.round((cell % columns) * pitch), y: Math.round(Math.floor(cell / columns) * pitch), size };
  }

  #queue() {
    if (this.isQueued) return;
    this.isQueued = true;
    requestAnimationFrame(() => {
      this.isQueued = false;
      if (this.snapshot) this.#draw();
    });
  }

  /** The largest cells with which the whole pool is in sight, but no smaller than can be told apart. */
  #lay(width) {
    const { num } = this.range;
    const height = Math.max(220, Math.min(0.42 * window.innerHeight, 460));
    const ratio = window.devicePixelRatio || 1;
    let pitch = width < 500 ? LARGEST_CELL_OF_PHONES : LARGEST_CELL;
    while (pitch > SMALLEST_CELL && Math.ceil(num / Math.floor(width / pitch)) * pitch > height) pitch -= 1;
    const columns = Math.min(Math.floor(width / pitch), num);
    const gap = pitch >= 9 ? 2 : pitch >= 5 ? 1 : ratio >= 2 ? 0.5 : 0;
    const size = pitch - gap;
    if (pitch >= 9 && columns < num) pitch = width / columns; // up to the edge; in small cells uneven gaps would show
    return { columns, pitch, size, height: Math.ceil(Math.ceil(num / columns) * pitch) };
  }

  #draw() {
    const width = this.canvas.clientWidth;
    if (!this.drawn || width !== this.width) {
      this.width = width;
      this.layout = this.#lay(width);
      this.canvas.style.height = `${this.layout.height}px`;
      this.context = fitted(this.canvas, width, this.layout.height);
      this.drawn = new Float64Array(this.snapshot.paint.length).fill(NaN);
    }
    const { context, chosen, drawn, colours } = this;
    const { size } = this.layout;
    const { paint } = this.snapshot;
    const { first, num } = this.range;
    for (let block = first; block < first + num; block += 1) {
      const isDimmed = chosen !== null && !chosen[block];
      const shown = isDimmed ? paint[block] - 0.5 : paint[block]; // paints are whole numbers
      if (drawn[block] === shown) continue;
      drawn[block] = shown;
      const { x, y } = this.placeOf(block);
      context.clearRect(x, y, size, size);
      context.globalAlpha = isDimmed && paint[block] !== EMPTY ? DIMMED : 1;
      drawCell(context, x, y, size, paint[block], colours);
    }
    context.globalAlpha = 1;
    this.on.point(this.cursor);
  }

  #pointAt(event) {
    if (!this.snapshot || !this.layout) return;
    const { columns, pitch } = this.layout;
    const column = Math.floor(event.offsetX / pitch);
    const { first, num } = this.range;
    const block = first + column + columns * Math.floor(event.offsetY / pitch);
    const isBlock = column < columns && block < first + num;
    if (this.cursor !== (isBlock ? block : 0)) this.moveTo(isBlock ? block : 0);
  }

  #press(event) {
    if (!this.snapshot || !this.layout || event.ctrlKey || event.altKey || event.metaKey) return;
    const { columns } = this.layout;
    const { first, num } = this.range;
    const last = first + num - 1;
    const rowStart = this.cursor - ((this.cursor - first) % columns);
    const moves = {
      ArrowLeft: this.cursor - 1, ArrowRight: this.cursor + 1, ArrowUp: this.cursor - columns,
      ArrowDown: this.cursor + columns, PageUp: this.cursor - 10 * columns, PageDown: this.cursor + 10 * columns,
      Home: event.shiftKey ? first : rowStart, End: event.shiftKey ? last : Math.min(rowStart + columns - 1, last),
    };
    if (event.key in moves) {
      const wanted = moves[event.key];
      if (wanted >= first && wanted <= last) this.moveTo(wanted);
    } else if ((event.key === "Enter" || event.key === " ") && this.cursor) {
      this.on.choose(this.cursor);
    } else {
      return;
    }
    event.preventDefault();
  }
}
