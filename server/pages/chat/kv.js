
// The strip that shows how full the KV cache is: live while an answer of this page runs, now and then otherwise, since a
// snapshot holds every block and many may have the page open. Without /kv/snapshot (404; 403: the key is not for it) there is no strip.

const KV_SETTLED_MS = 300; // blocks are given back soon after an answer's end
const KV_LOOK_MS = 5000;

class KvStrip {
  /** show: called with the pool of each snapshot. */
  constructor(show) {
    this.show = show;
    this.pool = null;
    this.isBusy = false;
    this.isMissing = false; // also while a key is missing
    this.turn = new AbortController();
    document.addEventListener("visibilitychange", () => this.turn.abort());
    this.#loop();
  }

  /** Tell whether an answer runs. */
  setBusy(isBusy) {
    if (isBusy !== this.isBusy) this.turn.abort();
    this.isBusy = isBusy;
  }

  /** Look again, after a key was given. */
  again() {
    this.isMissing = false;
    this.turn.abort();
  }

  /** One turn lasts until something changes; hidden pages ask for nothing. */
  async #loop() {
    for (;;) {
      this.turn = new AbortController();
      const { signal } = this.turn;
      const isWanted = !document.hidden && !this.isMissing;
      if (isWanted) await (this.isBusy ? this.#follow(signal) : this.#look(signal)).catch((error) => this.#fail(error));
      await aborted(signal, isWanted ? KV_LOOK_MS : null);
    }
  }

  async #look(signal) {
    await aborted(signal, KV_SETTLED_MS);
    if (!signal.aborted) this.#show((await (await ask("kv/snapshot", { signal })).json()).pool);
  }

  async #follow(signal) {
    const reply = await ask("kv/stream", { signal });
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      const last = events.findLast((event) => event.startsWith("event: snapshot\n"));
      if (last) this.#show(JSON.parse(last.slice(last.indexOf("data: ") + 6)).pool);
      else if (events.some((event) => /^event: (state|end)\n/.test(event))) this.#showGap();
    }
  }

  #fail(error) {
    if (error.name === "AbortError") return;
    this.isMissing = error.status === 404 || error.status === 403 || error.kind === "key";
    this.#showGap();
  }

  #show(pool) {
    this.pool = pool;
    this.show(pool);
    const { num_blocks: total, num_used: used, num_cached: cached, block_size: size } = pool;
    const [shownUsed, shownTotal, shownCached] = [used, total, cached].map((number) => number.toLocaleString("en-US"));
    byId("kv").hidden = false;
    byId("kv").classList.remove("gone");
    byId("kv-used").style.width = `${total ? (100 * used) / total : 0}%`;
    byId("kv-cached").style.width = `${total ? (100 * cached) / total : 0}%`;
    byId("kv-used").classList.toggle("some", used > 0);
    setText(byId("kv-text"), `${shownUsed} / ${shownTotal} blocks`);
    byId("kv").title = `${shownUsed} of ${shownTotal} blocks of ${size} tokens held, ${shownCached} cached and free. Open the live page.`;
  }

  #showGap() {
    byId("kv").classList.add("gone");
  }
}

/** Wait for a signal, but not longer than ms; null: however long. */
function aborted(signal, ms) {
  return new Promise((resolve) => {
    if (signal.aborted) resolve();
    signal.addEventListener("abort", resolve, { once: true });
    if (ms !== null) setTimeout(resolve, ms);
  });
}
