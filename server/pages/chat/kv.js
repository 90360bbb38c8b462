
// The strip that shows how full the KV cache is. Without /kv/stream (404) there is no strip.

const KV_RETRY_MS = 5000;

class KvStrip {
  constructor() {
    this.controller = null;
    document.addEventListener("visibilitychange", () => this.run());
  }

  /** Follow the cache while the page is seen: nobody computes snapshots for a hidden one. */
  async run() {
    if (document.hidden) return this.controller?.abort();
    if (this.controller && !this.controller.signal.aborted) return;
    const controller = new AbortController();
    this.controller = controller;
    while (!controller.signal.aborted && !this.isMissing) {
      await this.#follow(controller.signal).catch((error) => {
        this.isMissing = error.status === 404 || error.kind === "key"; // a key brings run() again
      });
      this.#showGap();
      if (!controller.signal.aborted && !this.isMissing) await pause(KV_RETRY_MS);
    }
    controller.abort();
  }

  /** After a key was given. */
  again() {
    this.isMissing = false;
    this.run();
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

  #show({ num_blocks: total, num_used: used, num_cached: cached, block_size: size }) {
    byId("kv").hidden = false;
    byId("kv").classList.remove("gone");
    byId("kv-used").style.width = `${total ? (100 * used) / total : 0}%`;
    byId("kv-cached").style.width = `${total ? (100 * cached) / total : 0}%`;
    byId("kv-used").classList.toggle("some", used > 0);
    setText(byId("kv-text"), `${used.toLocaleString("en-US")} / ${total.toLocaleString("en-US")} blocks`);
    byId("kv").title = `${used.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} blocks of ${size} tokens held, ` +
      `${cached.toLocaleString("en-US")} cached and free. Open the live page.`;
  }

  #showGap() {
    byId("kv").classList.add("gone");
  }
}
