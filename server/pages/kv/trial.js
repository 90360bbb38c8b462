
// Twenty prompts that begin alike: the first computes the beginning, the others find it in the prefix cache and answer sooner.

const NUM_PROMPTS = 20;
const NUM_AT_ONCE = 3; // beside the first: few, so that the queue does not hide what is seen
const MAX_BEGINNING = 4096; // tokens; half of the context where that is less
const NUM_OUTPUT = 24;
const PASSAGE = "Leaves are folded once and sewn through the fold; many such gatherings make a book, and a binder joins them. ";

async function askServer(path, body, signal) {
  const key = sessionStorage.getItem(KEY_NAME);
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(body && { "content-type": "application/json" }) };
  const reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  const found = await reply.json();
  if (!reply.ok) throw new Error(found.error?.message ?? `The server answers ${reply.status}.`);
  return found;
}

class Trial {
  constructor() {
    this.controller = null;
    this.results = []; // { ms, numCached } or null while it is awaited
    byId("trial-go").addEventListener("click", () => (this.controller ? this.controller.abort() : this.#run()));
  }

  async #run() {
    this.controller = new AbortController();
    this.results = new Array(NUM_PROMPTS).fill(null);
    setText(byId("trial-go"), "Stop");
    byId("trial-result").hidden = false;
    this.#draw("Sending the first …");
    try {
      await this.#send(this.controller.signal);
      this.#draw(this.#summary());
    } catch (error) {
      this.#draw(error.name === "AbortError" ? "Stopped" : error.message || "The server does not answer.", error.name !== "AbortError");
      this.controller.abort(); // the others under way
    }
    this.controller = null;
    setText(byId("trial-go"), "Send them again");
  }

  async #send(signal) {
    const { data: [{ id: model, max_model_len: context }] } = await askServer("v1/models", null, signal);
    const { tokens } = await askServer("tokenize", { model, prompt: PASSAGE }, signal);
    const numBeginning = Math.min(MAX_BEGINNING, Math.floor((context ?? 1024) / 2));
    const beginning = Array.from({ length: numBeginning }, (_, i) => tokens[i % tokens.length]);
    const salt = crypto.getRandomValues(new Uint32Array(4)).join("-"); // each run begins with nothing cached
    const send = async (number) => {
      const { tokens: own } = await askServer("tokenize", { model, prompt: ` Question ${number + 1}: what is a quire?`, add_special_tokens: false }, signal);
      const answer = await askServer("v1/completions", { model, prompt: [...beginning, ...own], max_tokens: NUM_OUTPUT, ignore_eos: true, temperature: 0, cache_salt: salt }, signal);
      this.numPrompt = answer.usage.prompt_tokens;
      this.results[number] = { ms: answer.timings.ttft_ms, numCached: answer.usage.prompt_tokens_details?.cached_tokens ?? 0 };
      this.#draw(this.#summary());
    };
    await send(0);
    let next = 1;
    await Promise.all(Array.from({ length: NUM_AT_ONCE }, async () => {
      while (next < NUM_PROMPTS) await send(next++);
    }));
  }

  #summary() {
    const [first, ...others] = this.results.filter(Boolean);
    if (!first || !others.length) return `The first: ${first ? milliseconds(first.ms) : ""}`;
    const sorted = others.map(({ ms }) => ms).sort((a, b) => a - b);
    const middle = sorted[Math.floor(sorted.length / 2)];
    const factor = first.ms / middle;
    const cached = others.map(({ numCached }) => numCached).sort((a, b) => a - b)[Math.floor(others.length / 2)];
    const gain = factor >= 1.05 ? `, ${factor.toFixed(factor < 10 ? 1 : 0)} times sooner` : "";
    return `Time to the first token: ${milliseconds(first.ms)} for the first, ${milliseconds(middle)} for the median of the ${others.length} others${gain}. They found ${count(cached)} of ${count(this.numPrompt)} prompt tokens in the cache.`;
  }

  #draw(text, isWrong = false) {
    const most = Math.max(...this.results.map((result) => result?.ms ?? 0), 1);
    byId("trial-bars").replaceChildren(...this.results.map((result, i) => {
      const bar = element("i", { class: result ? (i ? "" : "first") : "wait", title: result ? `Prompt ${i + 1}: ${milliseconds(result.ms)}, ${count(result.numCached)} tokens cached` : `Prompt ${i + 1}` });
      bar.style.height = `${result ? (100 * result.ms) / most : 2}%`;
      return bar;
    }));
    byId("trial-bars").setAttribute("aria-label", text);
    setText(byId("trial-said"), text);
    byId("trial-said").className = isWrong ? "wrong" : "";
  }
}

function milliseconds(ms) {
  return ms < 1000 ? `${ms.toFixed(ms < 10 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
