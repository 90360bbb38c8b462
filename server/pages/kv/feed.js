
// The stream of snapshots: read with fetch, since an EventSource cannot send a key.

const KEY_NAME = "quire.key";
const SILENCE_MS = 20000; // the server pings every 15 s
const RETRY_MS = [500, 1000, 2000, 4000];

class Feed {
  /** on: { snapshot(answer), same(time), status(kind, text), keyNeeded(wasWrong) }. Begins with start(). */
  constructor(on) {
    this.on = on;
    this.isWanted = false;
    this.numFailures = 0;
    this.controller = null;
  }

  start() {
    if (this.isWanted) return;
    this.isWanted = true;
    this.#run();
  }

  /** The server then computes nothing for this page. */
  stop() {
    this.isWanted = false;
    this.controller?.abort();
  }

  useKey(key) {
    sessionStorage.setItem(KEY_NAME, key);
    this.stop();
    this.start();
  }

  async #run() {
    const controller = new AbortController();
    this.controller = controller;
    while (this.isWanted && this.controller === controller) {
      try {
        const { ok, isRefused } = await this.#connect(controller);
        if (isRefused) return;
        if (ok) this.numFailures = 0;
      } catch {
        if (!this.isWanted || this.controller !== controller) return;
        this.on.status("offline", "The server does not answer");
      }
      const wait = RETRY_MS[Math.min(this.numFailures, RETRY_MS.length - 1)];
      this.numFailures += 1;
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }

  /** Read one stream to its end. */
  async #connect(controller) {
    const key = sessionStorage.getItem(KEY_NAME);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const engine = new URLSearchParams(location.search).get("engine");
    const path = engine ? `kv/stream?engine=${encodeURIComponent(engine)}` : "kv/stream";
    const reply = await fetch(path, { headers, cache: "no-store", signal: controller.signal });
    if (reply.status === 401) {
      this.isWanted = false;
      this.on.keyNeeded(Boolean(key));
      return { ok: false, isRefused: true };
    }
    if (!reply.ok) {
      this.on.status("offline", `The server answers ${reply.status}`);
      return { ok: false, isRefused: false };
    }
    await this.#read(reply.body.pipeThrough(new TextDecoderStream()).getReader(), controller);
    return { ok: true, isRefused: false };
  }

  async #read(reader, controller) {
    let rest = "";
    for (;;) {
      const watchdog = setTimeout(() => reader.cancel(), SILENCE_MS);
      const { done, value } = await reader.read().finally(() => clearTimeout(watchdog));
      if (done || controller.signal.aborted) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) this.#take(event);
    }
  }

  #take(event) {
    const lines = event.split("\n");
    const name = lines.find((line) => line.startsWith("event: "))?.slice(7);
    const data = lines.find((line) => line.startsWith("data: "));
    if (!name || !data) return; // a ping
    const answer = JSON.parse(data.slice(6));
    this.numFailures = 0;
    if (name === "snapshot") this.on.snapshot(answer);
    else if (name === "same") this.on.same(answer.time);
    else if (name === "state") this.on.status("gap", `Engine: ${answer.stage.replace("_", " ")}`);
    else if (name === "end") this.on.status("offline", "The server is shutting down");
  }
}
