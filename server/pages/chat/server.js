
// Talking to the server: addresses, the API key, errors in a sentence, streams, and how far its start is.

const KEY_NAME = "quire.key"; // the page of the KV cache uses the same
const SILENCE_MS = 45000; // the server pings every 15 s
// Behind a proxy the page may be at /prefix as well as at /prefix/.
const BASE = location.pathname.endsWith("/") ? "" : `${location.pathname.split("/").pop()}/`;
const STAGES = {
  imports: "Starting the engine", config: "Reading the model's configuration", weights: "Loading the weights",
  kernels: "Compiling kernels", ranks: "Waiting for the other GPUs", kv_cache: "Sizing the KV cache",
  graphs: "Capturing CUDA graphs", self_test: "Testing itself", restarting: "Restarting the engine", draining: "Shutting down",
};

/** kind: key (401), starting (503 until ready), refused (any other status), broken (an event in a stream), lost (no answer). */
class ServerError extends Error {
  constructor(kind, message, { status = 0, code = "", param = "", retryAfterS = 0 } = {}) {
    super(message);
    Object.assign(this, { kind, status, code, param, retryAfterS });
  }
}

function keyHeaders() {
  const key = sessionStorage.getItem(KEY_NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Fetch a path of the API; anything but a 2xx is thrown as a ServerError. */
async function ask(path, { body, signal, method = body ? "POST" : "GET" } = {}) {
  const headers = { ...keyHeaders(), ...(body && { "content-type": "application/json" }) };
  let reply;
  try {
    reply = await fetch(BASE + path, { method, headers, signal, cache: "no-store", body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("lost", "The server does not answer.");
  }
  if (reply.ok) return reply;
  throw await errorOf(reply);
}

async function errorOf(reply) {
  const text = await reply.text().catch(() => "");
  let found = {};
  try {
    found = JSON.parse(text).error ?? {};
  } catch {
    // a proxy's own page
  }
  const message = found.message ?? `The server answers ${reply.status} ${reply.statusText}`.trim();
  const kind = reply.status === 401 ? "key" : found.code === "not_ready" ? "starting" : "refused";
  return new ServerError(kind, message, { status: reply.status, code: found.code ?? "", param: found.param ?? "", retryAfterS: Number(reply.headers.get("retry-after")) });
}

/** Yield the chunks of a chat stream. Throws a ServerError if it ends with an error, or without its end. */
async function* chunksOf(reply) {
  // Not piped through a TextDecoderStream: what lies in a pipe is lost when the connection breaks.
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await readInTime(reader);
      if (done) break;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError("broken", chunk.error.message ?? "The server failed.", { code: chunk.error.code });
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError("lost", "The connection broke off before the answer was whole.");
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ServerError("lost", "The connection broke off before the answer was whole.");
}

async function readInTime(reader) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error("silence")), SILENCE_MS);
  });
  return Promise.race([reader.read(), silence]).finally(() => clearTimeout(timer));
}

/** What /ready says: { isReady, isThere, text, done }. done: null where there is nothing to measure. */
async function readiness() {
  try {
    const reply = await fetch(`${BASE}ready`, { cache: "no-store" });
    const { stage, done } = await reply.json();
    const text = STAGES[stage] ?? stage.replaceAll("_", " ");
    return { isReady: reply.ok, isThere: true, text, done: done > 0 && done < 1 ? done : null };
  } catch {
    return { isReady: false, isThere: false, text: "The server does not answer; trying again", done: null };
  }
}

/** Watches a server that is not ready, and tells when it is. */
class Watch {
  /** onState: called with each answer of readiness(). */
  constructor(onState) {
    this.onState = onState;
    this.waiting = null;
  }

  /** Resolve once the server is ready. All callers share one loop. */
  untilReady() {
    this.waiting ??= this.#loop().finally(() => {
      this.waiting = null;
    });
    return this.waiting;
  }

  async #loop() {
    for (;;) {
      const state = await readiness();
      this.onState(state);
      if (state.isReady) return;
      await pause(state.isThere ? 400 : 1500);
    }
  }
}

function pause(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
