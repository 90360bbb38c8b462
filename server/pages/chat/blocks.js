
// The strip of the KV cache under an answer: the blocks that hold it light up, those that were found there already are hatched.

const MAX_CELLS = 96; // of the answer's own; a cell of a longer one stands for several blocks

class BlockStrip {
  constructor() {
    this.own = element("span", { class: "own" });
    this.rest = ["held", "cached", "empty"].map((kind) => element("i", { class: `rest ${kind}` }));
    this.label = element("span", { class: "hint" });
    this.bar = element("span", { class: "strip", role: "img" }, this.own, ...this.rest);
    this.node = element("div", { class: "blocks", hidden: true }, this.bar, this.label);
  }

  /** usage: of the answer so far; pool: of a snapshot, null while none is known. */
  show(usage, pool, isRunning) {
    const numTokens = (usage?.prompt_tokens ?? 0) + (usage?.completion_tokens ?? 0);
    this.node.hidden = !pool || !numTokens;
    if (this.node.hidden) return;
    const { block_size: size, num_blocks: total, num_used: used, num_cached: cached } = pool;
    const numOwn = Math.min(Math.ceil(numTokens / size), total);
    const numShared = Math.min(Math.floor((usage.prompt_tokens_details?.cached_tokens ?? 0) / size), numOwn);
    this.#drawOwn(numOwn, numShared, numTokens / size);
    // while it runs its blocks are among those held, afterwards among those that can be found again
    const others = [Math.max(used - (isRunning ? numOwn : 0), 0), Math.max(cached - (isRunning ? 0 : numOwn), 0)];
    const counts = [...others, Math.max(total - numOwn - others[0] - others[1], 0)];
    counts.forEach((number, i) => { this.rest[i].style.flexGrow = String(number); });
    this.rest.forEach((node, i) => { node.hidden = !counts[i]; });
    this.own.style.flexGrow = "0";
    const shown = numShared ? `${count(numShared, "block")} of ${numOwn.toLocaleString("en-US")} found in the KV cache` : count(numOwn, "new block");
    setText(this.label, `${shown} · ${total.toLocaleString("en-US")} in the pool`);
    this.bar.setAttribute("aria-label", `KV cache: this answer takes ${count(numOwn, "block")} of ${size} tokens, ${numShared} of them shared from the prefix cache. Others hold ${counts[0]}, ${counts[1]} are cached, ${counts[2]} empty.`);
    this.bar.title = `Blocks of ${size} tokens: ${numShared} found in the prefix cache (hatched), ${numOwn - numShared} of this answer's own; ${counts[0]} held by others, ${counts[1]} cached, ${counts[2]} empty`;
  }

  #drawOwn(numOwn, numShared, numFull) {
    const each = Math.ceil(numOwn / MAX_CELLS);
    const numCells = Math.ceil(numOwn / each);
    while (this.own.childElementCount > numCells) this.own.lastChild.remove();
    while (this.own.childElementCount < numCells) this.own.append(element("i"));
    [...this.own.children].forEach((cell, i) => {
      cell.className = (i + 1) * each <= numShared ? "shared" : "new";
      cell.style.setProperty("--full", `${100 * Math.min(Math.max(numFull / each - i, 0), 1)}%`);
    });
  }
}
