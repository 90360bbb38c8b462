
// The table of requests: sorted by any column, rows kept from one snapshot to the next.

const STATES = { gate: "compiling grammar", waiting: "waiting", running: "running", retiring: "retiring" };
const REASONS = {
  all: "all of it was cached", new: "what follows was never computed, or long ago", differs: "cached prompts go on differently from there",
  evicted: "what follows was overwritten", no_checkpoint: "no state is saved behind", window_left: "the window before is no longer cached",
  other_salt: "cached without a salt", other_adapter: "cached for another adapter", too_short: "shorter than a block",
  computed_whole: "all of its tokens are needed", no_room: "no room for a saved state beside the live one", off: "prefixes are not cached",
};
const OUT_OF_SIGHT = 8; // of the snapshots, one is written to a row that is scrolled away: it may be 2 s behind
const ORDER = { running: 0, retiring: 1, waiting: 2, gate: 3 };
// isSpare: left out on a phone; isStates: only of models with recurrent layers
const COLUMNS = [
  { name: "Request", value: (r) => keyOf(r), isText: true, title: "The id in the request's answer" },
  { name: "State", value: (r) => ORDER[r.state], show: (r) => STATES[r.state], hint: waitsFor, isText: true },
  { name: "Blocks", value: (r) => r.num_blocks, show: (r) => count(r.num_blocks) },
  { name: "Shared", value: (r) => r.num_shared_blocks, show: (r) => count(r.num_shared_blocks), title: "Blocks that other requests hold as well", isSpare: true },
  { name: "Memory", value: (r) => r.bytes, show: (r) => bytes(r.bytes), isSpare: true },
  { name: "Tokens", value: (r) => r.num_computed_tokens, show: (r) => [count(r.num_computed_tokens), ` / ${count(r.num_tokens)}`], title: "Computed, of prompt and output so far" },
  { name: "Prefix hit", value: (r) => r.num_hit_tokens, show: (r) => count(r.num_hit_tokens), hint: (r) => REASONS[r.cache_reason] ?? "", title: "Prompt tokens found in the prefix cache; a cell's own title says why no more", isSpare: true },
  { name: "Saved states", value: (r) => r.saved_tokens.length, show: (r) => statesOf(r), title: "Tokens before the state that it began with → tokens before the states that it saved", isSpare: true, isStates: true },
  { name: "Age", value: (r) => r.age_s, show: (r) => age(r.age_s) },
  { name: "Preempted", value: (r) => r.num_preemptions, show: (r) => count(r.num_preemptions), title: "Times it was sent back to the queue", isSpare: true },
];

class RequestTable {
  /** on: { choose(key), point(key or "") }. */
  constructor(table, on) {
    this.head = table.tHead;
    this.body = table.tBodies[0];
    this.on = on;
    this.rows = new Map(); // by key
    this.sortedBy = COLUMNS.findIndex(({ name }) => name === "Age");
    this.isDescending = true;
    this.isDark = false;
    this.requests = [];
    this.numShown = 0;
    this.scroller = table.parentElement;
    this.scroller.addEventListener("scroll", () => this.#fillVisible());
    this.#makeHead();
    this.body.addEventListener("click", (event) => this.#chosen(event.target.closest("tr")));
    this.body.addEventListener("keydown", (event) => this.#press(event));
    this.body.addEventListener("pointerover", (event) => this.on.point(event.target.closest("tr")?.dataset.key ?? ""));
    this.body.addEventListener("pointerleave", () => this.on.point(""));
  }

  show(requests) {
    this.requests = requests;
    const { value, isText } = COLUMNS[this.sortedBy];
    const sign = this.isDescending ? -1 : 1;
    const sorted = requests.map((request) => [value(request), keyOf(request), request]);
    sorted.sort(([a, keyA], [b, keyB]) => sign * (isText ? (a > b) - (a < b) : a - b) || (keyA > keyB) - (keyA < keyB));
    this.#update(sorted.map(([, key, request]) => ({ key, request })));
  }

  /** Mark the highlighted request's row, and the one pointed at on the map. */
  mark(chosen, pointed) {
    for (const [key, row] of this.rows) {
      row.setAttribute("aria-selected", String(key === chosen));
      row.classList.toggle("pointed", pointed.has(key));
    }
  }

  recolour(isDark) {
    this.isDark = isDark;
    for (const [key, row] of this.rows) row.swatch.style.background = colourOf(colourBook.codes.get(key), isDark);
  }

  /** Write what rows say; all 500 four times a second would be most of the page's work. */
  #fillVisible() {
    const height = this.body.rows[0].offsetHeight || 30;
    const first = Math.floor(this.scroller.scrollTop / height) - 2;
    const last = first + Math.ceil(this.scroller.clientHeight / height) + 4;
    let place = 0;
    for (const row of this.rows.values()) {
      const isDue = (place >= first && place <= last) || (this.numShown + place) % OUT_OF_SIGHT === 0;
      if (isDue || !row.isFilled) this.#fill(row, row.request);
      place += 1;
    }
  }

  #update(sorted) {
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    const known = this.rows;
    this.rows = new Map();
    for (const { key, request } of sorted) {
      const row = known.get(key) ?? this.#makeRow(key, request);
      row.request = request;
      this.rows.set(key, row);
    }
    const wanted = [...this.rows.values()];
    const present = this.body.rows;
    if (present.length !== wanted.length || wanted.some((row, place) => present[place] !== row) || !wanted.length) {
      this.body.replaceChildren(...(wanted.length ? wanted : [this.#nothing()]));
      if (focused?.isConnected) focused.focus({ preventScroll: true });
    }
    if (wanted.length && !wanted.some((row) => row.tabIndex === 0)) wanted[0].tabIndex = 0;
    this.numShown += 1;
    this.#fillVisible();
  }

  #makeHead() {
    const cells = COLUMNS.map(({ name, title, isText, isSpare, isStates }, place) => {
      const button = element("button", title ? { type: "button", title } : { type: "button" }, name);
      button.addEventListener("click", () => this.#sortBy(place));
      return element("th", { scope: "col", class: classes(isText, isSpare, isStates) }, button);
    });
    this.head.replaceChildren(element("tr", {}, ...cells));
    this.#markHead();
  }

  #sortBy(place) {
    this.isDescending = place === this.sortedBy ? !this.isDescending : !COLUMNS[place].isText;
    this.sortedBy = place;
    this.#markHead();
    this.show(this.requests);
  }

  #markHead() {
    [...this.head.rows[0].cells].forEach((cell, place) => {
      if (place === this.sortedBy) cell.setAttribute("aria-sort", this.isDescending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  #makeRow(key, request) {
    const row = element("tr", { "data-key": key, tabindex: "-1", "aria-selected": "false" });
    row.swatch = element("i");
    row.swatch.style.background = colourOf(colourBook.codes.get(key), this.isDark);
    const name = element("td", { class: "left id", title: request.id }, row.swatch);
    const [kind, ...rest] = partsOf(request);
    name.append(element("span", { class: "kind" }, kind), ...rest);
    row.append(name, ...COLUMNS.slice(1).map(({ isText, isSpare, isStates }) => element("td", { class: classes(isText, isSpare, isStates) })));
    return row;
  }

  #fill(row, request) {
    row.isFilled = true;
    for (let place = 1; place < COLUMNS.length; place += 1) {
      const column = COLUMNS[place];
      const cell = row.cells[place];
      const shown = column.show(request);
      if (typeof shown === "string") {
        setText(cell, shown);
      } else {
        if (!cell.firstElementChild) cell.append("", element("span", { class: "of" }));
        if (cell.firstChild.data !== shown[0]) cell.firstChild.data = shown[0];
        setText(cell.lastChild, shown[1]);
      }
      if (column.hint && cell.title !== column.hint(request)) cell.title = column.hint(request);
      cell.classList.toggle("zero", column.value(request) === 0 && !column.isText);
    }
    row.cells[1].className = `left state-${request.state}`;
  }

  #nothing() {
    return element("tr", {}, element("td", { class: "nothing", colspan: String(COLUMNS.length) }, "No requests now"));
  }

  #chosen(row) {
    if (!row?.dataset.key) return;
    for (const other of this.rows.values()) other.tabIndex = other === row ? 0 : -1;
    this.on.choose(row.dataset.key);
  }

  #press(event) {
    const row = event.target.closest("tr");
    const rows = [...this.rows.values()];
    const place = rows.indexOf(row);
    const moves = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: rows.length - 1 };
    if (event.key === "Enter" || event.key === " ") {
      this.#chosen(row);
    } else if (event.key in moves) {
      const next = rows[moves[event.key]];
      if (next) {
        row.tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
      }
    } else {
      return;
    }
    event.preventDefault();
  }
}

function classes(isText, isSpare, isStates) {
  return [isText ? "left" : "", isSpare ? "spare" : "", isStates ? "states" : ""].join(" ").trim();
}

/** What a waiting request waits for, if that is on its way from a lower tier. */
function waitsFor({ num_host_blocks: host = 0, num_disk_blocks: disk = 0 }) {
  const parts = [[host, "host memory"], [disk, "disk"]].filter(([number]) => number).map(([number, from]) => `${count(number)} blocks from ${from}`);
  return parts.length ? `waits for ${parts.join(" and ")}` : "";
}

function statesOf(request) {
  const saved = request.saved_tokens.map(count).join(", ");
  if (!request.restored_tokens) return saved || "0";
  return saved ? `${count(request.restored_tokens)} → ${saved}` : `${count(request.restored_tokens)} →`;
}
