
// One answer: as data, as it grows from a stream, and as it is drawn.

function newAnswer() {
  return { id: newId(), role: "assistant", content: "", reasoning: "", calls: [], model: "", finish: "", thinkingMs: 0, usage: null,
    timings: null, ttftMs: null, lastMs: null, ignored: [], error: null };
}

/** Let an answer go on where it ended. */
function reopen(answer) {
  Object.assign(answer, { finish: "", error: null, ttftMs: null, timings: null, earlier: answer.usage?.completion_tokens ?? 0 });
}

/** Add a chunk of a chat stream to the answer. */
function take(answer, chunk, sinceStartMs) {
  answer.model = chunk.model ?? answer.model;
  answer.usage = chunk.usage ?? answer.usage;
  answer.timings = chunk.timings ?? answer.timings;
  for (const { delta, finish_reason: finish, logprobs } of chunk.choices ?? []) {
    const reasoning = delta?.reasoning_content ?? delta?.reasoning ?? "";
    if (answer.ttftMs === null && (reasoning || delta?.content || delta?.tool_calls)) answer.ttftMs = sinceStartMs;
    answer.reasoning += reasoning;
    answer.content += delta?.content ?? "";
    takeWords(answer, logprobs);
    for (const part of delta?.tool_calls ?? []) takeCall(answer.calls, part);
    if (reasoning) answer.thinkingMs = sinceStartMs - answer.ttftMs;
    answer.finish = finish ?? answer.finish;
    answer.lastMs = sinceStartMs;
  }
}

function takeCall(calls, { index, id, function: called }) {
  calls[index] ??= { id: "", name: "", arguments: "" };
  calls[index].id ||= id ?? "";
  calls[index].name += called?.name ?? "";
  calls[index].arguments += called?.arguments ?? "";
}

/** An answer on the page. Its buttons carry data-act and are served by the page. */
class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.thoughts = document.createTextNode("");
    this.summary = element("span");
    this.thinking = element("details", { class: "thinking", hidden: true },
      element("summary", {}, icon("chevron"), this.summary), element("div", { class: "thoughts" }, this.thoughts));
    // Whoever opens or shuts it himself keeps it so.
    this.thinking.firstChild.addEventListener("click", () => { this.isTouched = true; });
    this.text = element("div", { class: "text" });
    this.markdown = new Markdown(this.text);
    this.calls = element("div", { class: "calls" });
    this.notice = element("div", { class: "notice", role: "status", hidden: true });
    this.blocks = new BlockStrip();
    this.foot = element("div", { class: "foot" });
    this.node = element("article", { class: "message assistant", "aria-label": "Answer", "data-id": answer.id },
      this.thinking, this.text, this.calls, this.notice, this.blocks.node, this.foot);
    this.node.view = this;
  }

  /** Draw what is there now; isDone: nothing more will come. */
  draw(isDone) {
    const { answer } = this;
    this.node.classList.toggle("running", !isDone);
    this.node.classList.toggle("empty", !answer.content && !answer.reasoning && !answer.calls.length);
    this.#drawThinking(isDone);
    this.markdown.show(answer.content, isDone);
    for (const text of this.markdown.takeSettled()) if (this.isLive) say(text);
    answer.calls.forEach((call, i) => this.#drawCall(call, i));
    if (isDone) this.#drawEnd();
    else this.foot.replaceChildren(answer.usage?.completion_tokens ? count(answer.usage.completion_tokens, "token") : "");
  }

  /** Show its blocks. pool: of the latest snapshot. */
  drawBlocks(pool, isRunning) {
    this.blocks.show(this.answer.usage, pool, isRunning);
  }

  /** Draw code and formulas anew, once a library is there. */
  redraw() {
    this.markdown.again(this.answer.content, !this.node.classList.contains("running"));
  }

  /** A line in place of an answer that has not begun. done: 0 to 1, or null. */
  wait(text, done) {
    this.notice.hidden = !text;
    this.notice.className = "notice waiting";
    this.notice.replaceChildren(...(text ? [element("span", {}, text), ...(done === null ? [] : [bar(done)])] : []));
  }

  #drawThinking(isDone) {
    const { answer } = this;
    if (!answer.reasoning) return;
    const isThinking = !isDone && !answer.content && !answer.calls.length;
    setData(this.thoughts, answer.reasoning.trim());
    this.thinking.hidden = false;
    this.thinking.classList.toggle("now", isThinking);
    if (!this.isTouched) this.thinking.open = isThinking;
    const box = this.thinking.lastChild;
    if (isThinking) box.scrollTop = box.scrollHeight;
    setText(this.summary, isThinking ? "Thinking" : answer.thinkingMs >= 100 ? `Thought for ${seconds(answer.thinkingMs)}` : "Thoughts");
  }

  #drawCall({ name, arguments: text }, i) {
    if (!this.calls.childNodes[i]) {
      const code = element("pre", { tabindex: "0" }, element("code"));
      this.calls.append(element("section", { class: "call", "aria-label": "Tool call" },
        element("h3", {}, icon("tool"), element("span", { class: "call-name" })), code));
    }
    const node = this.calls.childNodes[i];
    setText(node.querySelector(".call-name"), name);
    setText(node.querySelector("code"), pretty(text));
  }

  #drawEnd() {
    const { answer } = this;
    this.wait("", null);
    this.foot.hidden = false;
    if (answer.error) this.#drawError();
    const copy = answer.content ? [actButton("copy", "Copy the answer")] : [];
    const go = canGoOn(answer) ? [actButton("go", "Go on with the answer")] : [];
    const words = probabilities.has(answer) ? [actButton("words", "Mark the words that the model was unsure of")] : [];
    if (words.length) words[0].setAttribute("aria-pressed", "false");
    const figures = element("span", { class: "figures", title: details(answer) }, figuresOf(answer));
    this.foot.replaceChildren(element("span", { class: "acts" }, ...copy, ...go, actButton("retry", "Answer again"), ...words,
      actButton("code", "The request as code")), figures);
  }

  #drawError() {
    const { error } = this.answer;
    const again = element("button", { type: "button", "data-act": "retry" }, "Try again");
    this.notice.hidden = false;
    this.notice.className = "notice error";
    this.notice.setAttribute("role", "alert");
    this.foot.hidden = this.node.classList.contains("empty");
    this.notice.replaceChildren(icon("warning"), element("p", {}, error), again);
  }
}

/** Whether more can be had of an answer: it was cut, not ended. */
function canGoOn({ content, calls, finish, error }) {
  return Boolean(content) && !calls.length && (finish === "length" || finish === "stopped" || Boolean(error));
}

function actButton(act, label) {
  const made = iconButton(act, label);
  made.dataset.act = act;
  return made;
}

function bar(done) {
  const made = element("progress", { max: "1", value: String(done), "aria-label": "Start of the server" });
  return made;
}

/** Arguments as they are while they are no whole JSON. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function count(number, noun) {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}

function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s`;
}

/** The line under an answer: `TTFT 41 ms · 171 tok/s · 22 tokens · 16 of 17 cached`. */
function figuresOf(answer) {
  const { usage, timings, ttftMs, finish, ignored, error } = answer;
  const parts = [];
  const ttft = timings?.ttft_ms ?? ttftMs;
  if (ttft !== null && ttft !== undefined) parts.push(`TTFT ${seconds(ttft)}`);
  const rate = rateOf(answer);
  if (rate) parts.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tok/s`);
  if (usage?.completion_tokens) parts.push(count(usage.completion_tokens + (answer.earlier ?? 0), "token"));
  if (usage?.prompt_tokens) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${cached.toLocaleString("en-US")} of ${usage.prompt_tokens.toLocaleString("en-US")} prompt tokens cached`);
  }
  if (finish === "length") parts.push("cut at the token limit");
  else if (finish === "stopped") parts.push("stopped");
  else if (finish && finish !== "stop" && finish !== "tool_calls") parts.push(finish);
  if (ignored.length) parts.push(`without effect here: ${ignored.join(", ")}`);
  return error && !parts.length ? "" : parts.join(" · ");
}

/** Tokens a second: as the server measured it, or of a stopped answer as it was seen here. */
function rateOf({ usage, timings, ttftMs, lastMs }) {
  if (timings) return timings.itl_ms ? 1000 / timings.itl_ms : 0;
  const others = (usage?.completion_tokens ?? 0) - 1;
  return others > 0 && lastMs > ttftMs ? (1000 * others) / (lastMs - ttftMs) : 0;
}

function details({ model, usage, timings }) {
  const rows = [model];
  for (const name of ["queue", "prefill", "ttft", "itl", "total"]) {
    if (typeof timings?.[`${name}_ms`] === "number") rows.push(`${name} ${timings[`${name}_ms`].toFixed(1)} ms`);
  }
  const thoughts = usage?.completion_tokens_details?.reasoning_tokens;
  if (thoughts) rows.push(`${thoughts} tokens of thinking`);
  return rows.filter(Boolean).join("\n");
}
