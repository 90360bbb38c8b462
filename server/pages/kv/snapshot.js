
// From the JSON of /kv/snapshot to one entry per block.

const EMPTY = -1;
const CACHED = -2;
const SHARED = -3; // all other paints are the colour of the one request that holds the block
const colourBook = new ColourBook();

function* blocksOf(runs) {
  for (let i = 0; i < runs.length; i += 2) {
    const step = runs[i + 1] > 0 ? 1 : -1;
    for (let block = runs[i], left = Math.abs(runs[i + 1]); left > 0; block += step, left -= 1) yield block;
  }
}

class Snapshot {
  /** paint[b]: what block b shows; numHolders[b]: how many requests have it. Block 0 is nobody's. */
  constructor(answer) {
    Object.assign(this, { model: answer.model, time: answer.time, step: answer.step_id, pool: answer.pool });
    Object.assign(this, { totals: answer.totals, requests: answer.requests, numUnlisted: answer.num_unlisted, tiers: answer.tiers ?? [] });
    const size = this.pool.num_blocks + 1;
    this.paint = new Float64Array(size).fill(EMPTY);
    this.numHolders = new Uint16Array(size);
    this.byKey = new Map();
    this.numSaved = 0; // blocks that sharing spares
    for (const request of this.requests) this.byKey.set(keyOf(request), request);
    colourBook.keep(this.byKey.keys());
    for (const request of this.requests) this.#add(request);
    for (const block of blocksOf(answer.cached_runs)) this.paint[block] = CACHED;
    const isUsed = (paint, block) => block > 0 && paint !== EMPTY;
    const last = this.paint.findLastIndex(isUsed);
    this.used = last < 0 ? null : { first: this.paint.findIndex(isUsed), last }; // between which blocks all content lies
  }

  #add(request) {
    const { paint, numHolders } = this;
    const code = colourBook.codes.get(keyOf(request));
    const { runs } = request;
    for (let i = 0; i < runs.length; i += 2) { // not blocksOf, which is slow in the thousands
      const step = runs[i + 1] > 0 ? 1 : -1;
      for (let block = runs[i], left = Math.abs(runs[i + 1]); left > 0; block += step, left -= 1) {
        numHolders[block] += 1;
        if (numHolders[block] > 1) this.numSaved += 1;
        paint[block] = numHolders[block] > 1 ? SHARED : code;
      }
    }
  }

  /** What the block at a place of a request's tables has: tokens, of a window or state no places. */
  contentOf(request, place) {
    const { groups, block_size } = this.pool;
    let first = 0; // of the group's runs
    for (const [index, group] of groups.entries()) {
      const runs = request.runs.slice(2 * first, 2 * (first + request.group_runs[index]));
      const size = sizeOf(runs);
      if (place < size) {
        if (group.kind === "state") return `live state, page ${count(place + 1)} of ${count(size)}`;
        if (group.kind === "window") return "sliding window";
        const token = Math.floor(place / group.num_pages) * group.num_tokens;
        return `tokens ${count(token)} to ${count(token + group.num_tokens - 1)}`;
      }
      place -= size;
      first += request.group_runs[index];
    }
    return `tokens ${count(place * block_size)} to ${count((place + 1) * block_size - 1)}`;
  }

  /** The requests that have a block, each with the block's place in its table. */
  holdersOf(block) {
    const found = [];
    if (!this.numHolders[block]) return found;
    for (const request of this.requests) {
      const place = placeOf(request.runs, block);
      if (place >= 0) found.push({ request, place });
    }
    return found;
  }
}

/** The number of blocks in runs. */
function sizeOf(runs) {
  let size = 0;
  for (let i = 1; i < runs.length; i += 2) size += Math.abs(runs[i]);
  return size;
}

function placeOf(runs, block) {
  let before = 0;
  for (let i = 0; i < runs.length; i += 2) {
    const offset = runs[i + 1] > 0 ? block - runs[i] : runs[i] - block;
    if (offset >= 0 && offset < Math.abs(runs[i + 1])) return before + offset;
    before += Math.abs(runs[i + 1]);
  }
  return -1;
}
