
// The page: joins feed, map, table and time line.

const THEMES = ["auto", "light", "dark"];
const KINDS = { full: "Full attention", window: "Sliding window", state: "Recurrent states" };
const TIERS = { host: "Host memory", disk: "Disk" };
const THEME_NAME = "quire.theme";
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

let snapshot = null;
let chosenKey = ""; // of the highlighted request
let pointedKey = ""; // of the row under the pointer
let isPaused = false;
let zoomWish = null; // null: as it is useful

const feed = new Feed({ snapshot: showSnapshot, same: showSame, status: showStatus, keyNeeded: askForKey });
const pool = new PoolMap(byId("blocks"), { point: pointAtBlock, choose: chooseBlock });
const table = new RequestTable(byId("requests"), { choose: toggle, point: pointAtRow });
const timeline = new Timeline(byId("timeline"), { point: pointAtMoment, span: (title) => setText(byId("time-title"), title) });

function showSnapshot(answer) {
  snapshot = new Snapshot(answer);
  byId("key-form").hidden = true;
  byId("main").hidden = false;
  setText(byId("model"), snapshot.model);
  showEngines(answer);
  showLive();
  byId("requests").dataset.states = snapshot.pool.states ? "some" : "none";
  showTiles();
  pool.show(snapshot);
  showZoom(); // after the map knows the snapshot: it says which blocks are in sight
  showKinds(snapshot.pool);
  showTiers(snapshot.tiers);
  table.show(snapshot.requests);
  if (chosenKey && !snapshot.byKey.has(chosenKey)) chosenKey = "";
  highlight();
  timeline.add(snapshot);
  const unlisted = byId("unlisted");
  unlisted.hidden = !snapshot.numUnlisted;
  setText(unlisted, `and ${count(snapshot.numUnlisted)} more in the queue`);
}

/** Of several engines: a link to the cache of each. */
function showEngines({ engine, engines }) {
  const nav = byId("engines");
  nav.hidden = !engines.length;
  if (nav.children.length !== engines.length) nav.replaceChildren(...engines.map(() => document.createElement("a")));
  engines.forEach((name, place) => {
    const link = nav.children[place];
    setText(link, name);
    link.href = `?engine=${encodeURIComponent(name)}`;
    if (name === engine) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
}

/** The engine is idle: only ages grow. */
function showSame(time) {
  if (!snapshot) return;
  for (const request of snapshot.requests) request.age_s += time - snapshot.time;
  snapshot.time = time;
  showLive();
  table.show(snapshot.requests);
  timeline.extend(time);
}

function showLive() {
  showStatus("live", `Live · step ${count(Math.max(snapshot.step, 0))}`);
}

function showStatus(kind, text) {
  byId("status").dataset.kind = isPaused && kind === "live" ? "paused" : kind;
  setText(byId("status-text"), isPaused ? "Paused" : text);
  const isStale = kind !== "live" && kind !== "connecting";
  document.body.classList.toggle("stale", isStale && snapshot !== null && !isPaused);
  byId("main").hidden = snapshot === null && !isStale;
  const notice = byId("notice");
  notice.hidden = !isStale || isPaused;
  setText(notice, isStale ? text : "");
}

function showTiles() {
  const { pool: sizes, totals, requests } = snapshot;
  const total = sizes.num_blocks;
  setText(byId("occupancy"), percent(sizes.num_used, total));
  setText(byId("occupancy-blocks"), `${count(sizes.num_used)} of ${count(total)} blocks`);
  setText(byId("occupancy-bytes"), `${bytes(sizes.num_used * sizes.bytes_per_block)} of ${bytes(total * sizes.bytes_per_block)} · ${count(sizes.num_cached)} cached`);
  setText(byId("sizes"), `${count(total)} blocks of ${sizes.block_size} tokens, ${bytes(sizes.bytes_per_block)} each`);
  const [shared, held, cached] = byId("bar").children;
  shared.style.width = `${(100 * sizes.num_shared) / total}%`;
  held.style.width = `${(100 * (sizes.num_used - sizes.num_shared)) / total}%`;
  cached.style.width = `${(100 * sizes.num_cached) / total}%`;
  byId("bar").setAttribute("aria-label", `${count(sizes.num_shared)} blocks shared, ${count(sizes.num_used - sizes.num_shared)} held by one request, ${count(sizes.num_cached)} cached and free, ${count(sizes.num_empty)} empty`);
  const numOf = (...states) => requests.filter((request) => states.includes(request.state)).length;
  setText(byId("running"), count(numOf("running", "retiring")));
  setText(byId("waiting"), `${count(numOf("waiting", "gate") + snapshot.numUnlisted)} waiting`);
  setText(byId("shared"), count(sizes.num_shared));
  setText(byId("saved"), snapshot.numSaved ? `saves ${bytes(snapshot.numSaved * sizes.bytes_per_block)}` : "none now");
  setText(byId("hits"), totals.hit_rate === null ? "–" : percent(totals.num_hit_tokens, totals.num_queried_tokens));
  setText(byId("hit-tokens"), `${count(totals.num_hit_tokens)} tokens`);
  setText(byId("evictions"), count(totals.num_evictions));
  showStates(sizes.states);
  setText(byId("preemptions"), count(totals.num_preemptions));
  byId("blocks").setAttribute("aria-label", `Pool of ${count(total)} blocks, ${percent(sizes.num_used, total)} in use`);
}

/** A large pool of which little is used is seen near by, unless somebody has chosen. */
function showZoom() {
  const { pool: { num_blocks: total }, used } = snapshot;
  const size = used ? used.last - used.first + 1 : 0;
  const isUseful = total > 1000 && size > 0;
  const isZoomed = zoomWish ?? (isUseful && size < (pool.isZoomed ? 0.5 : 0.25) * total);
  if (isZoomed !== pool.isZoomed) pool.zoom(isZoomed);
  byId("zoom").hidden = !isUseful && !isZoomed;
  byId("zoom").setAttribute("aria-pressed", String(isZoomed));
  const { first, num } = pool.range ?? { first: 1, num: total };
  setText(byId("in-sight"), isZoomed && num < total ? `blocks ${count(first)} to ${count(first + num - 1)} are in sight` : "");
}

/** Models with several kinds of layers lend them blocks of one pool. */
function showKinds({ kinds, num_blocks: total }) {
  byId("kinds").hidden = kinds.length < 2;
  if (kinds.length < 2) return;
  byId("kind-rows").replaceChildren(...kinds.map(({ kind, num_used: used, num_cached: cached }) => {
    const meter = element("div", { class: "bar", role: "img", "aria-label": `${KINDS[kind] ?? kind}: ${count(used)} blocks held, ${count(cached)} cached` }, element("i", { class: "held" }), element("i", { class: "cached" }));
    meter.children[0].style.width = `${(100 * used) / total}%`;
    meter.children[1].style.width = `${(100 * cached) / total}%`;
    return element("div", {}, element("dt", {}, KINDS[kind] ?? kind), element("dd", {}, element("b", {}, count(used)), element("span", {}, ` held, ${count(cached)} cached`)), element("dd", {}, meter));
  }));
}

/** Memory behind the pool: what it holds, what is on its way, what it was good for. */
function showTiers(tiers) {
  byId("tiers").hidden = !tiers.length;
  byId("tier-rows").replaceChildren(...tiers.map((tier) => {
    const meter = element("div", { class: "bar", role: "img", "aria-label": `${TIERS[tier.name] ?? tier.name}: ${percent(tier.bytes, tier.max_bytes)} in use` }, element("i", { class: "cached" }));
    meter.firstChild.style.width = `${tier.max_bytes ? (100 * tier.bytes) / tier.max_bytes : 0}%`;
    const moving = [["to it", tier.num_incoming], ["from it", tier.num_outgoing]].filter(([, number]) => number).map(([way, number]) => `${count(number)} ${way}`);
    const waiting = tier.num_waiting ? [tier.num_waiting === 1 ? "1 request waits for it" : `${count(tier.num_waiting)} requests wait for it`] : [];
    const notes = [tier.is_paused ? "left alone after errors" : "", ...moving, ...waiting, `${count(tier.num_hit_tokens)} tokens hit`, `${count(tier.num_evictions)} evicted`,
      tier.num_errors ? `${count(tier.num_errors)} errors` : ""].filter(Boolean);
    return element("div", {}, element("dt", {}, TIERS[tier.name] ?? tier.name),
      element("dd", {}, element("b", {}, bytes(tier.bytes)), element("span", {}, ` of ${bytes(tier.max_bytes)}, ${count(tier.num_blocks)} blocks`)), element("dd", {}, meter),
      element("dd", { class: "note", title: notes.join(", ") }, notes.join(" · ")));
  }));
}

/** Only models with recurrent layers have states. */
function showStates(states) {
  byId("states-tile").hidden = byId("requests").dataset.states === "none";
  if (!states) return;
  setText(byId("states"), count(states.num_live));
  setText(byId("saved-states"), `${count(states.num_saved)} saved, ${bytes(states.saved_bytes)}`);
  byId("states-tile").title = `Since the start: ${count(states.num_made)} saved, ${count(states.num_skipped)} not saved for want of memory, ${count(states.num_restored)} restored, ${count(states.num_evicted)} overwritten`;
}

/** Highlight the request that is pointed at in the table, else the chosen one. */
function highlight() {
  const request = snapshot.byKey.get(pointedKey) ?? snapshot.byKey.get(chosenKey);
  pool.highlight(request?.num_blocks ? request : null);
  table.mark(chosenKey, new Set(pool.cursor ? snapshot.holdersOf(pool.cursor).map((holder) => keyOf(holder.request)) : []));
  const chosen = snapshot.byKey.get(chosenKey);
  setText(byId("chosen"), chosen ? `${nameOf(chosen)} highlighted: ${count(chosen.num_blocks)} blocks` : "");
}

function toggle(key) {
  chosenKey = chosenKey === key ? "" : key;
  if (!chosenKey) pointedKey = "";
  highlight();
}

function pointAtRow(key) {
  if (key === pointedKey || !snapshot) return;
  pointedKey = key;
  highlight();
}

/** A shared block's holders are highlighted in turn. */
function chooseBlock(block) {
  const keys = snapshot.holdersOf(block).map((holder) => keyOf(holder.request));
  chosenKey = keys[keys.indexOf(chosenKey) + 1] ?? "";
  highlight();
  byId("said").textContent = chosenKey ? `${byId("chosen").textContent}` : "Nothing highlighted";
}

function pointAtBlock(block) {
  const tip = byId("tip");
  const cursor = byId("cursor");
  tip.hidden = cursor.hidden = !block;
  const isNew = block !== Number(tip.dataset.block);
  tip.dataset.block = String(block);
  if (block) {
    const lines = describe(block);
    tip.replaceChildren(...lines);
    const { x, y, size } = pool.placeOf(block);
    const { offsetLeft, offsetTop, clientWidth } = pool.canvas;
    Object.assign(cursor.style, { left: `${offsetLeft + x - 2}px`, top: `${offsetTop + y - 2}px`, width: `${size + 4}px`, height: `${size + 4}px` });
    const left = Math.min(Math.max(x - tip.offsetWidth / 2, 0), clientWidth - tip.offsetWidth);
    const isBelow = y < tip.offsetHeight + 14;
    Object.assign(tip.style, { left: `${offsetLeft + left}px`, top: `${offsetTop + (isBelow ? y + size + 10 : y - tip.offsetHeight - 10)}px` });
    if (isNew && document.activeElement === pool.canvas) byId("said").textContent = lines.map((line) => line.textContent).join(", ");
  }
  if (isNew && snapshot) highlight();
}

function describe(block) {
  const { paint } = snapshot;
  const line = (...parts) => element("p", {}, ...parts);
  if (paint[block] === EMPTY) return [line(`Block ${count(block)}`), line("empty")];
  if (paint[block] === CACHED) return [line(`Block ${count(block)}`), line("free, and its content can still be found")];
  const holders = snapshot.holdersOf(block);
  const shown = holders.slice(0, 4).map(({ request, place }) => {
    const swatch = element("i");
    swatch.style.background = colourOf(colourBook.codes.get(keyOf(request)), pool.colours.isDark);
    return line(swatch, `${nameOf(request)}, ${snapshot.contentOf(request, place)}`);
  });
  if (holders.length > 4) shown.push(line(`and ${count(holders.length - 4)} more`));
  return [line(`Block ${count(block)}${holders.length > 1 ? `, shared by ${count(holders.length)}` : ""}`), ...shown];
}

function pointAtMoment(moment) {
  const when = moment && new Date(moment.time * 1000).toLocaleTimeString();
  setText(byId("then"), moment ? `${when} · ${percent(moment.used, moment.numBlocks)} used · ${count(moment.running)} running` : "");
}

function askForKey(wasWrong) {
  byId("main").hidden = true;
  byId("key-form").hidden = false;
  byId("status").dataset.kind = "offline";
  setText(byId("status-text"), "API key needed");
  byId("key-note").className = wasWrong ? "wrong" : "";
  if (wasWrong) setText(byId("key-note"), "That key was not accepted.");
  byId("key").select();
  byId("key").focus();
}

function showTheme() {
  const wanted = localStorage.getItem(THEME_NAME) ?? "auto";
  const isDark = wanted === "auto" ? systemIsDark.matches : wanted === "dark";
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  document.documentElement.style.colorScheme = isDark ? "dark" : "light";
  setText(byId("theme-name"), wanted[0].toUpperCase() + wanted.slice(1));
  pool.redraw();
  table.recolour(isDark);
  timeline.draw();
  const paints = { held: "held", shared: SHARED, cached: CACHED, empty: EMPTY };
  for (const swatch of document.querySelectorAll("[data-swatch]")) {
    const { swatch: name } = swatch.dataset;
    const context = fitted(swatch, 13, 13);
    drawCell(context, 0, 0, 13, paints[name], pool.colours);
  }
}

/** Nobody looks at a hidden tab, so its server is not asked. */
function watch() {
  if (document.hidden || isPaused) feed.stop();
  else if (byId("key-form").hidden) feed.start();
}

byId("theme").addEventListener("click", () => {
  const wanted = localStorage.getItem(THEME_NAME) ?? "auto";
  localStorage.setItem(THEME_NAME, THEMES[(THEMES.indexOf(wanted) + 1) % THEMES.length]);
  showTheme();
});
byId("zoom").addEventListener("click", () => {
  zoomWish = !pool.isZoomed;
  if (snapshot) showZoom();
});
byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  setText(byId("pause"), isPaused ? "Resume" : "Pause");
  showStatus(isPaused ? "live" : "connecting", "Connecting");
  watch();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("key-form").hidden = true;
  feed.useKey(byId("key").value.trim());
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !snapshot) return;
  chosenKey = pointedKey = "";
  pool.moveTo(0);
  highlight();
});
document.addEventListener("visibilitychange", watch);
systemIsDark.addEventListener("change", showTheme);
const trial = new Trial();
showTheme();
watch();
