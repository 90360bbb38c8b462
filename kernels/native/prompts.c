/* Attention of prompts over the paged pool: products of pairs of bf16, sums and softmax in fp32, no gathered pages.
 *
 * kernels/attention/torch_ref.py is the specification. As in FlashAttention (Dao et al. 2022, arXiv:2205.14135) keys
 * come in blocks, and each query keeps the maximum and the sum of its softmax so far. Blocks begin at multiples of BLOCK
 * in a row's positions, so a query's numbers depend neither on how its prompt is cut nor on the rows beside it. Weights
 * are rounded to bf16 before they are multiplied by values; their sum is not.
 */

#include "threads.h"

#if HAS_PRODUCTS

#include <immintrin.h>

enum {
    LANES = 16,
    BLOCK = 64,             /* keys */
    VECTORS = BLOCK / LANES,
    ROWS = 6,               /* queries of a tile: with VECTORS of keys or of values, its sums stay in registers */
    MAX_HEAD = 256,
    MAX_QUERIES = 128,      /* that share a packed block of keys and values */
    MAX_SUMS = 128 * 128    /* of these with their values */
};

static const float LOG2_E = 1.44269504f;

typedef struct {
    const bf16 *q, *k_cache, *v_cache;
    bf16 *out;
    const int32_t *starts, *lengths, *table;
    const float *sinks;
    int64_t rows, heads, kv_heads, dim, v_dim, table_width, block_size, k_block, k_slot, v_block, v_slot, window, chunk;
    int64_t tokens, items; /* of a tile of a row; in all */
    float scale, cap;
} Prompts;

/* Queries of one key-value head, the heads of a token side by side. */
typedef struct {
    const Prompts *prompts;
    const int32_t *table;
    int64_t first, kv_head, queries; /* first: its first token, of the step */
    int64_t position;                /* of that token in its row */
    __attribute__((aligned(64))) bf16 keys[BLOCK * MAX_HEAD];   /* [dim / 2, BLOCK, 2] */
    __attribute__((aligned(64))) bf16 values[BLOCK * MAX_HEAD]; /* [BLOCK / 2, v_dim in whole vectors, 2] */
    __attribute__((aligned(64))) float sums[MAX_SUMS + ROWS * MAX_HEAD];
    __attribute__((aligned(64))) float totals[MAX_QUERIES + ROWS][LANES]; /* of weights, by lane */
    float largest[MAX_QUERIES + ROWS]; /* logits, times log2(e) as all of them */
} Tile;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

/* The first key that a query sees. */
static inline int64_t oldest(const Prompts *a, int64_t position)
{
    if (a->window > 0)
        return position < a->window ? 0 : position - a->window + 1;
    return a->chunk > 0 ? position / a->chunk * a->chunk : 0;
}

/* 2^x within 3e-7 of its value (Cephes, exp2f), of -126 or more; NaN stays NaN. */
static inline __attribute__((always_inline)) __m512 power(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x); /* of a NaN the second operand */
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_sub_ps(x, n), p = _mm512_set1_ps(1.535336188e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.339887440e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.618437357e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550332471e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402264791e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931472028e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

static float power_of(float x) { return _mm512_cvtss_f32(power(_mm512_set1_ps(x))); }

/* cap * tanh(x / cap) */
static __m512 capped(__m512 x, float cap)
{
    __m512 one = _mm512_set1_ps(1.0f), twice = _mm512_mul_ps(x, _mm512_set1_ps(2.0f * LOG2_E / cap));
    __m512 e = power(_mm512_min_ps(_mm512_set1_ps(126.0f), twice));
    __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
    return _mm512_mul_ps(tanh, _mm512_set1_ps(cap));
}

/* ---- packing ---- */

static const bf16 ZEROS[MAX_HEAD];

/* Where the keys, or the values, of a block lie; zeros for those that no query of the tile sees: they may be anything. */
static void locate(const Tile *t, const bf16 *cache, int64_t block_stride, int64_t slot_stride, int64_t start,
                   int64_t first, int64_t end, const bf16 **found)
{
    int64_t size = t->prompts->block_size;
    for (int64_t i = 0; i < BLOCK; i++) {
        int64_t token = start + i;
        found[i] = token < first || token >= end
                       ? ZEROS
                       : cache + t->table[token / size] * block_stride + token % size * slot_stride;
    }
}

/* Transpose words of 32 bits. */
static inline __attribute__((always_inline)) void transpose(__m512i x[LANES])
{
    __m512i y[LANES];
    for (int i = 0; i < LANES; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            y[i + 8 * j] = _mm512_shuffle_i32x4(x[i + 8 * j], x[i + 8 * j + 4], 0x88);
            y[i + 8 * j + 4] = _mm512_shuffle_i32x4(x[i + 8 * j], x[i + 8 * j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}

static void pack_keys(Tile *t, const bf16 **keys)
{
    int64_t words = t->prompts->dim / 2;
    for (int64_t word = 0; word < words; word += LANES) {
        int64_t n = smaller(words - word, LANES);
        __mmask16 mask = (__mmask16)((1u << n) - 1);
        for (int v = 0; v < VECTORS; v++) {
            __m512i x[LANES];
            for (int i = 0; i < LANES; i++)
                x[i] = _mm512_maskz_loadu_epi32(mask, keys[v * LANES + i] + 2 * word);
            transpose(x);
            for (int64_t i = 0; i < n; i++)
                _mm512_store_si512(t->keys + ((word + i) * BLOCK + v * LANES) * 2, x[i]);
        }
    }
}

static void pack_values(Tile *t, const bf16 **values)
{
    int64_t dim = t->prompts->v_dim, width = whole(dim, LANES);
    int16_t order[2][2 * LANES];
    for (int i = 0; i < 2 * LANES; i++) {
        order[0][i] = i / 2 + i % 2 * 2 * LANES;
        order[1][i] = order[0][i] + LANES;
    }
    const __m512i low = _mm512_loadu_si512(order[0]), high = _mm512_loadu_si512(order[1]);
    for (int64_t pair = 0; pair < BLOCK / 2; pair++) {
        bf16 *out = t->values + pair * width * 2;
        for (int64_t i = 0; i < dim; i += 2 * LANES) {
            __mmask32 mask = dim - i >= 2 * LANES ? ~0u : (1u << (dim - i)) - 1;
            __m512i a = _mm512_maskz_loadu_epi16(mask, values[2 * pair] + i);
            __m512i b = _mm512_maskz_loadu_epi16(mask, values[2 * pair + 1] + i);
            _mm512_store_si512(out + 2 * i, _mm512_permutex2var_epi16(a, low, b));
            if (i + LANES < width)
                _mm512_store_si512(out + 2 * i + 2 * LANES, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

/* ---- a tile of ROWS queries ---- */

static inline __attribute__((always_inline)) __m512bh pair_of(const bf16 *x)
{
    int32_t word;
    memcpy(&word, x, 4);
    return (__m512bh)_mm512_set1_epi32(word);
}

/* Multiply the sums of ROWS queries by `shrinks` and add their weights, [ROWS, BLOCK], times C vectors of values. */
static inline __attribute__((always_inline)) void add_values(Tile *t, int64_t query, int64_t column, int64_t width,
                                                             const bf16 (*weights)[BLOCK], const float *shrinks,
                                                             const int C)
{
    __m512 sums[ROWS][VECTORS];
    float *out = t->sums + query * width + column;
    const bf16 *values = t->values + column * 2;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < C; c++)
            sums[r][c] = _mm512_mul_ps(_mm512_loadu_ps(out + r * width + c * LANES), _mm512_set1_ps(shrinks[r]));
    for (int64_t pair = 0; pair < BLOCK / 2; pair++, values += 2 * width) {
        __m512bh v[VECTORS];
        for (int c = 0; c < C; c++)
            v[c] = (__m512bh)_mm512_load_si512(values + c * 2 * LANES);
        for (int r = 0; r < ROWS; r++) {
            __m512bh w = pair_of(weights[r] + 2 * pair);
            for (int c = 0; c < C; c++)
                sums[r][c] = _mm512_dpbf16_ps(sums[r][c], w, v[c]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < C; c++)
            _mm512_storeu_ps(out + r * width + c * LANES, sums[r][c]);
}

/* Which of the keys from `start` on a query at `position` sees. */
static uint64_t visible(const Prompts *a, int64_t position, int64_t start)
{
    int64_t first = oldest(a, position) - start, end = position + 1 - start;
    if (end <= 0 || first >= BLOCK)
        return 0;
    uint64_t mask = end >= BLOCK ? ~(uint64_t)0 : ((uint64_t)1 << end) - 1;
    return first > 0 ? mask & ~(((uint64_t)1 << first) - 1) : mask;
}

/* ROWS queries from number `query` on with a block of keys. Queries behind the last one are the last. */
static void attend_block(Tile *t, int64_t query, int64_t start)
{
    const Prompts *a = t->prompts;
    int64_t group = a->heads / a->kv_heads, words = a->dim / 2, width = whole(a->v_dim, LANES);
    const bf16 *q[ROWS];
    uint64_t seen[ROWS], any = 0;
    for (int r = 0; r < ROWS; r++) {
        int64_t i = smaller(query + r, t->queries - 1);
        q[r] = a->q + ((t->first + i / group) * a->heads + t->kv_head * group + i % group) * a->dim;
        any |= seen[r] = visible(a, t->position + i / group, start);
    }
    if (!any)
        return;
    __m512 logits[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < VECTORS; c++)
            logits[r][c] = _mm512_setzero_ps();
    const bf16 *keys = t->keys;
    for (int64_t word = 0; word < words; word++, keys += 2 * BLOCK) {
        __m512bh k[VECTORS];
        for (int c = 0; c < VECTORS; c++)
            k[c] = (__m512bh)_mm512_load_si512(keys + c * 2 * LANES);
        for (int r = 0; r < ROWS; r++) {
            __m512bh x = pair_of(q[r] + 2 * word);
            for (int c = 0; c < VECTORS; c++)
                logits[r][c] = _mm512_dpbf16_ps(logits[r][c], x, k[c]);
        }
    }
    __attribute__((aligned(64))) bf16 weights[ROWS][BLOCK];
    float shrinks[ROWS];
    const __m512 scale = _mm512_set1_ps(a->cap > 0.0f ? a->scale : a->scale * LOG2_E);
    for (int r = 0; r < ROWS; r++) {
        __m512 most = _mm512_set1_ps(-__builtin_inff()), sum = _mm512_setzero_ps();
        for (int c = 0; c < VECTORS; c++) {
            logits[r][c] = _mm512_mul_ps(logits[r][c], scale);
            if (a->cap > 0.0f)
                logits[r][c] = _mm512_mul_ps(capped(logits[r][c], a->cap), _mm512_set1_ps(LOG2_E));
            most = _mm512_mask_max_ps(most, (__mmask16)(seen[r] >> c * LANES), most, logits[r][c]);
        }
        float before = t->largest[query + r], largest = _mm512_reduce_max_ps(most);
        largest = largest > before ? largest : before;
        shrinks[r] = largest == before ? 1.0f : power_of(before - largest);
        t->largest[query + r] = largest;
        for (int c = 0; c < VECTORS; c++) {
            __m512 weight = power(_mm512_sub_ps(logits[r][c], _mm512_set1_ps(largest)));
            logits[r][c] = _mm512_maskz_mov_ps((__mmask16)(seen[r] >> c * LANES), weight);
            sum = _mm512_add_ps(sum, logits[r][c]);
        }
        for (int c = 0; c < VECTORS; c += 2)
            _mm512_store_si512(weights[r] + c * LANES, (__m512i)_mm512_cvtne2ps_pbh(logits[r][c + 1], logits[r][c]));
        float *total = t->totals[query + r];
        _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_load_ps(total), _mm512_set1_ps(shrinks[r]), sum));
    }
    int64_t column = 0;
    for (; column + VECTORS * LANES <= width; column += VECTORS * LANES)
        add_values(t, query, column, width, weights, shrinks, VECTORS);
    for (; column < width; column += LANES)
        add_values(t, query, column, width, weights, shrinks, 1);
}

/* Divide the sums of a query, write them. */
static void finish(const Tile *t, int64_t query)
{
    const Prompts *a = t->prompts;
    int64_t group = a->heads / a->kv_heads, head = t->kv_head * group + query % group, width = whole(a->v_dim, LANES);
    float total = _mm512_reduce_add_ps(_mm512_load_ps(t->totals[query])), shrink = 1.0f;
    if (a->sinks) {
        float sink = a->sinks[head] * LOG2_E, largest = t->largest[query];
        if (sink > largest) {
            shrink = power_of(largest - sink);
            total = total * shrink + 1.0f;
        } else {
            total += power_of(sink - largest);
        }
    }
    const float *sums = t->sums + query * width;
    const __m512 factor = _mm512_set1_ps(shrink / total);
    bf16 *out = a->out + ((t->first + query / group) * a->heads + head) * a->v_dim;
    for (int64_t i = 0; i < a->v_dim; i += LANES) {
        __mmask16 mask = a->v_dim - i >= LANES ? 0xffff : (__mmask16)((1u << (a->v_dim - i)) - 1);
        __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(sums + i), factor));
        _mm256_mask_storeu_epi16(out + i, mask, rounded);
    }
}

/* Tokens of a row from `token` on, at most a tile's, with a key-value head. */
static void attend_tile(const Prompts *a, int64_t row, int64_t token, int64_t kv_head)
{
    Tile t;
    const bf16 *found[BLOCK];
    int64_t group = a->heads / a->kv_heads, width = whole(a->v_dim, LANES);
    int64_t num_tokens = a->starts[row + 1] - a->starts[row];
    int64_t tokens = smaller(a->tokens, num_tokens - token);
    t.prompts = a;
    t.table = a->table + row * a->table_width;
    t.first = a->starts[row] + token;
    t.kv_head = kv_head;
    t.queries = tokens * group;
    t.position = a->lengths[row] - num_tokens + token;
    if (a->lengths[row] <= 0) {
        for (int64_t i = 0; i < tokens; i++)
            memset(a->out + ((t.first + i) * a->heads + kv_head * group) * a->v_dim, 0,
                   group * a->v_dim * sizeof(bf16));
        return;
    }
    int64_t padded = whole(t.queries, ROWS), first = oldest(a, t.position), end = t.position + tokens;
    memset(t.sums, 0, padded * width * sizeof(float));
    memset(t.totals, 0, padded * sizeof t.totals[0]);
    for (int64_t i = 0; i < padded; i++)
        t.largest[i] = -__builtin_inff();
    for (int64_t start = first / BLOCK * BLOCK; start < end; start += BLOCK) {
        locate(&t, a->k_cache + kv_head * a->dim, a->k_block, a->k_slot, start, first, end, found);
        pack_keys(&t, found);
        locate(&t, a->v_cache + kv_head * a->v_dim, a->v_block, a->v_slot, start, first, end, found);
        pack_values(&t, found);
        for (int64_t query = 0; query < t.queries; query += ROWS)
            attend_block(&t, query, start);
    }
    for (int64_t i = 0; i < t.queries; i++)
        finish(&t, i);
}

static int64_t tiles_of(const Prompts *a, int64_t row)
{
    return (a->starts[row + 1] - a->starts[row] + a->tokens - 1) / a->tokens;
}

/* Late tokens first: they see the most keys, and short items at the end leave no thread waiting. */
static void attend_items(const void *data, int64_t first, int64_t last)
{
    const Prompts *a = data;
    for (int64_t i = first; i < last; i++) {
        int64_t item = a->items - 1 - i, kv_head = item % a->kv_heads, tile = item / a->kv_heads, row = 0;
        for (int64_t n; tile >= (n = tiles_of(a, row)); row++)
            tile -= n;
        attend_tile(a, row, tile * a->tokens, kv_head);
    }
}

/* q: [tokens, heads, dim]; caches: [blocks, block_size, kv_heads, dim or v_dim] with strides of blocks and slots;
 * starts: [rows + 1], of each row's tokens in q and out; lengths: [rows] with these tokens, its last, 0 gives zeros;
 * table: [rows, table_width]; sinks: [heads] or NULL; out: [tokens, heads, v_dim]. A token sees itself and those before
 * it: of all `window` at most, or those since the last multiple of `chunk`; both 0: all. cap: of logits, 0: none. dim is
 * even and at most MAX_HEAD as v_dim is, heads of a group are at most 16. longest: a bound of lengths. */
void attend_prompts(const bf16 *q, const bf16 *k_cache, const bf16 *v_cache, bf16 *out, const int32_t *starts,
                    const int32_t *lengths, const int32_t *table, const float *sinks, int64_t rows, int64_t heads,
                    int64_t kv_heads, int64_t dim, int64_t v_dim, int64_t table_width, int64_t block_size,
                    int64_t k_block, int64_t k_slot, int64_t v_block, int64_t v_slot, int64_t window, int64_t chunk,
                    int64_t longest, float scale, float cap)
{
    int64_t group = heads / kv_heads, queries = smaller(MAX_QUERIES, MAX_SUMS / whole(v_dim, LANES)), items = 0;
    Prompts args = {q,        k_cache, v_cache, out,         starts,     lengths, table,  sinks,   rows,   heads,
                    kv_heads, dim,     v_dim,   table_width, block_size, k_block, k_slot, v_block, v_slot, window,
                    chunk,    queries / group, 0, scale, cap};
    for (int64_t row = 0; row < rows; row++)
        items += tiles_of(&args, row);
    args.items = items * kv_heads;
    share_in_turns(attend_items, &args, args.items, longest * dim * group);
}

#endif
