
// Occupancy over the last five minutes, as far as this tab has watched.

const SPANS = { 60: "Last minute", 120: "Last two minutes", 300: "Last five minutes" }; // the first that holds all
const LONGEST_S = 300;
const TOPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1]; // of the scale: the first that holds all
const INSET = { left: 44, right: 14, top: 14, bottom: 22 };

class Timeline {
  /** on: { point(moment or null), span(title) }: what was at the place that is pointed at; what is in sight. */
  constructor(canvas, on) {
    this.canvas = canvas;
    this.on = on;
    this.moments = []; // { time, shared, used, cached, numBlocks, running }
    this.pointed = null;
    this.span = 60; // seconds
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.#pointAt(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.#pointAt(null));
  }

  add(snapshot) {
    const { pool, time } = snapshot;
    const running = snapshot.requests.filter((request) => request.state === "running").length;
    this.#push({ time, shared: pool.num_shared, used: pool.num_used, cached: pool.num_cached, numBlocks: pool.num_blocks, running });
  }

  /** Nothing has changed until now. */
  extend(time) {
    const last = this.moments.at(-1);
    if (last) this.#push({ ...last, time });
  }

  #push(moment) {
    const before = this.moments.at(-2);
    const last = this.moments.at(-1);
    const isFlat = before && ["shared", "used", "cached", "running"].every((name) => before[name] === moment[name] && last[name] === moment[name]);
    if (isFlat && moment.time - before.time < 5) this.moments.pop(); // the ends of a level line suffice
    this.moments.push(moment);
    while (this.moments.length > 2 && this.moments[1].time < moment.time - LONGEST_S) this.moments.shift();
    const watched = moment.time - this.moments[0].time;
    this.span = Number(Object.keys(SPANS).find((span) => watched <= span) ?? LONGEST_S);
    this.on.span(SPANS[this.span]);
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    const last = this.moments.at(-1);
    if (!width || !last) return;
    const context = fitted(this.canvas, width, height);
    const colours = palette();
    this.toX = (time) => width - INSET.right - ((last.time - time) / this.span) * (width - INSET.left - INSET.right);
    const most = Math.max(...this.moments.map(({ used, cached, numBlocks }) => (used + cached) / numBlocks));
    this.top = TOPS.find((top) => most <= top) ?? 1;
    const toY = (share) => height - INSET.bottom - (share / this.top) * (height - INSET.top - INSET.bottom);
    this.#drawGrid(context, colours, toY, width);
    context.save();
    context.beginPath();
    context.rect(INSET.left, 0, width - INSET.left - INSET.right, height);
    context.clip();
    this.#fill(context, colours.cached, toY, (moment) => moment.used + moment.cached);
    this.#fill(context, colours.held, toY, (moment) => moment.used);
    this.#fill(context, colours.shared, toY, (moment) => moment.shared);
    context.restore();
    if (this.pointed) this.#drawPointer(context, colours, toY);
    const share = percent(last.used, last.numBlocks);
    this.canvas.setAttribute("aria-label", `Occupancy over the last five minutes: ${share} now, ${this.#peak()} at most`);
  }

  #peak() {
    const highest = this.moments.reduce((a, b) => (b.used / b.numBlocks > a.used / a.numBlocks ? b : a));
    return percent(highest.used, highest.numBlocks);
  }

  #drawGrid(context, colours, toY, width) {
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.fillStyle = colours.dim;
    context.strokeStyle = colours.line;
    context.textBaseline = "middle";
    for (const share of [0, this.top / 2, this.top]) {
      const y = Math.round(toY(share)) + 0.5;
      context.beginPath();
      context.moveTo(INSET.left, y);
      context.lineTo(width - INSET.right, y);
      context.stroke();
      context.textAlign = "right";
      context.fillText(`${Number((share * 100).toFixed(1))}%`, INSET.left - 8, y);
    }
    const last = this.moments.at(-1).time;
    const step = this.span === LONGEST_S ? 60 : this.span / 4;
    for (let ago = 0; ago <= this.span; ago += step) {
      context.textAlign = ago === 0 ? "right" : ago === this.span ? "left" : "center";
      const label = ago % 60 ? `−${ago} s` : `−${ago / 60} min`;
      context.fillText(ago ? label : "now", this.toX(last - ago), toY(0) + 12);
    }
  }

  /** Steps, since a snapshot holds until the next one. */
  #fill(context, colour, toY, value) {
    context.fillStyle = colour;
    context.beginPath();
    context.moveTo(this.toX(this.moments[0].time), toY(0));
    let level = value(this.moments[0]) / this.moments[0].numBlocks;
    for (const moment of this.moments) {
      context.lineTo(this.toX(moment.time), toY(level));
      level = value(moment) / moment.numBlocks;
      context.lineTo(this.toX(moment.time), toY(level));
    }
    context.lineTo(this.toX(this.moments.at(-1).time), toY(0));
    context.fill();
  }

  #drawPointer(context, colours, toY) {
    const x = Math.round(this.toX(this.pointed.time)) + 0.5;
    context.strokeStyle = colours.text;
    context.beginPath();
    context.moveTo(x, toY(this.top));
    context.lineTo(x, toY(0));
    context.stroke();
  }

  #pointAt(x) {
    this.pointed = null;
    if (x !== null && this.toX) {
      this.pointed = this.moments.findLast((moment) => this.toX(moment.time) <= x) ?? null;
    }
    this.on.point(this.pointed);
    this.draw();
  }
}
