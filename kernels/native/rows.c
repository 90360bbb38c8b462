/* Row-wise ops of 16-bit models between the products, and attention of rows of one token over the paged pool.
 *
 * kernels/elementwise/cpu.py and kernels/attention/torch_ref.py are the specifications; library.py declares and calls
 * these functions. Tensors are bf16 and dense in their last dimension but where a stride is given, strides count
 * numbers. Sums are in fp32, and each result is rounded once. Plain C: the compiler makes vectors of the loops.
 */

#include "threads.h"

enum { MAX_HEAD = 256, MAX_GROUP = 16, CHUNK = 64 };

static inline float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

/* e^x within 3e-7 of its value (Cephes, expf), clamped to what fp32 holds; NaN stays NaN. So a gate of -inf gives -inf
   where torch gives NaN: a row that is not finite stays so. */
static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = x - n * 0.693147181f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

/* ---- norms and activations ---- */

typedef struct {
    const bf16 *x, *residual, *weight;
    bf16 *out, *sum;
    int64_t dim;
    float eps;
} Norm;

static void norm_rows(const void *data, int64_t first, int64_t last)
{
    const Norm *a = data;
    int64_t dim = a->dim;
    for (int64_t row = first; row < last; row++) {
        const bf16 *restrict x = a->x + row * dim;
        const bf16 *restrict weight = a->weight;
        bf16 *restrict out = a->out + row * dim;
        float squares = 0.0f;
        if (a->residual) {
            const bf16 *restrict residual = a->residual + row * dim;
            bf16 *restrict sum = a->sum + row * dim;
            for (int64_t i = 0; i < dim; i++) {
                sum[i] = narrow(wide(x[i]) + wide(residual[i]));
                squares += wide(sum[i]) * wide(sum[i]);
            }
            x = sum;
        } else {
            for (int64_t i = 0; i < dim; i++)
                squares += wide(x[i]) * wide(x[i]);
        }
        float inverse = inverse_root(squares / dim + a->eps);
        for (int64_t i = 0; i < dim; i++)
            out[i] = narrow(wide(x[i]) * inverse * wide(weight[i]));
    }
}

/* x, residual, out, sum: [rows, dim]; weight: [dim]. residual NULL: nothing is added, and sum is not written. */
void rms_norm(const bf16 *x, const bf16 *residual, const bf16 *weight, bf16 *out, bf16 *sum, int64_t rows, int64_t dim,
              float eps)
{
    Norm args = {x, residual, weight, out, sum, dim, eps};
    share(norm_rows, &args, rows, dim);
}

typedef struct {
    const bf16 *x;
    bf16 *out;
    int64_t dim;
} Gate;

static void gate_rows(const void *data, int64_t first, int64_t last)
{
    const Gate *a = data;
    int64_t dim = a->dim;
    for (int64_t row = first; row < last; row++) {
        const bf16 *restrict gate = a->x + row * 2 * dim;
        const bf16 *restrict up = gate + dim;
        bf16 *restrict out = a->out + row * dim;
        for (int64_t i = 0; i < dim; i++) {
            float g = wide(gate[i]);
            out[i] = narrow(wide(narrow(g / (1.0f + exponential(-g)))) * wide(up[i]));
        }
    }
}

/* x: [rows, 2 * dim], gates before ups; out: [rows, dim]. */
void silu_and_mul(const bf16 *x, bf16 *out, int64_t rows, int64_t dim)
{
    Gate args = {x, out, dim};
    share(gate_rows, &args, rows, 4 * dim);
}

/* ---- norms of heads, rotation, write to the pool ---- */

typedef struct {
    const bf16 *qkv, *q_weight, *k_weight;
    const int64_t *positions, *slots;
    const void *turns;
    bf16 *q, *k_cache, *v_cache;
    int64_t heads, kv_heads, dim, block_size, k_block, k_slot, v_block, v_slot, wide_turns;
    float eps;
} Rope;

static void rope_rows(const void *data, int64_t first, int64_t last)
{
    const Rope *a = data;
    int64_t dim = a->dim, half = dim / 2;
    float turns[MAX_HEAD], head[MAX_HEAD];
    for (int64_t row = first; row < last; row++) {
        const bf16 *x = a->qkv + row * (a->heads + 2 * a->kv_heads) * dim;
        int64_t block = a->slots[row] / a->block_size, slot = a->slots[row] % a->block_size;
        bf16 *keys = a->k_cache + block * a->k_block + slot * a->k_slot;
        bf16 *values = a->v_cache + block * a->v_block + slot * a->v_slot;
        if (a->wide_turns)
            memcpy(turns, (const float *)a->turns + a->positions[row] * dim, dim * sizeof(float));
        else
            for (int64_t i = 0; i < dim; i++)
                turns[i] = wide(((const bf16 *)a->turns)[a->positions[row] * dim + i]);
        for (int64_t h = 0; h < a->heads + a->kv_heads; h++, x += dim) {
            const bf16 *weight = h < a->heads ? a->q_weight : a->k_weight;
            bf16 *restrict out = h < a->heads ? a->q + (row * a->heads + h) * dim : keys + (h - a->heads) * dim;
            float squares = 0.0f;
            for (int64_t i = 0; i < dim; i++) {
                head[i] = wide(x[i]);
                squares += head[i] * head[i];
            }
            if (weight) {
                float inverse = inverse_root(squares / dim + a->eps);
                for (int64_t i = 0; i < dim; i++)
                    head[i] = head[i] * inverse * wide(weight[i]);
            }
            for (int64_t i = 0; i < half; i++) {
                out[i] = narrow(head[i] * turns[i] - head[half + i] * turns[half + i]);
                out[half + i] = narrow(head[half + i] * turns[i] + head[i] * turns[half + i]);
            }
        }
        memcpy(values, x, a->kv_heads * dim * sizeof(bf16));
    }
}

/* qkv: [rows, (heads + 2 * kv_heads) * dim]; weights: [dim] or NULL; turns: [positions, dim], cosines before sines, fp32
 * if wide_turns; q: [rows, heads, dim]; caches: [blocks, block_size, kv_heads, dim] with strides of blocks and slots. */
void norm_rope_write_kv(const bf16 *qkv, const bf16 *q_weight, const bf16 *k_weight, const int64_t *positions,
                        const int64_t *slots, const void *turns, bf16 *q, bf16 *k_cache, bf16 *v_cache, int64_t rows,
                        int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, int64_t k_block,
                        int64_t k_slot, int64_t v_block, int64_t v_slot, int64_t wide_turns, float eps)
{
    Rope args = {qkv,   q_weight, k_weight,   positions, slots,  turns,   q,      k_cache,    v_cache, heads,
                 kv_heads, dim,   block_size, k_block,   k_slot, v_block, v_slot, wide_turns, eps};
    share(rope_rows, &args, rows, 2 * (heads + 2 * kv_heads) * dim);
}

/* ---- attention ---- */

typedef struct {
    const bf16 *q, *k_cache, *v_cache;
    bf16 *out;
    const int32_t *lengths, *table;
    int64_t heads, kv_heads, dim, v_dim, table_width, block_size, k_block, k_slot, v_block, v_slot, window, chunk;
    float scale;
} Attention;

/* Where a token's key, or value, of a head lies. */
static inline const bf16 *at(const bf16 *cache, int64_t block_stride, int64_t slot_stride, const int32_t *table,
                             int64_t block_size, int64_t token)
{
    return cache + table[token / block_size] * block_stride + token % block_size * slot_stride;
}

static inline void fetch(const bf16 *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += 32)
        __builtin_prefetch(x + i);
}

/* One key-value head of one row: its keys in pieces of CHUNK, with the softmax's maximum and sum so far. Sizes that are
 * constants of the compiler make it 2.5 times as slow: gcc 12 unrolls the loops before it makes vectors of them. */
static void attend_head(const Attention *a, int64_t row, int64_t kv_head)
{
    int64_t dim = a->dim, v_dim = a->v_dim;
    int64_t group = a->heads / a->kv_heads, length = a->lengths[row], block_size = a->block_size;
    float q[MAX_GROUP][MAX_HEAD], sums[MAX_GROUP][MAX_HEAD], weights[MAX_GROUP][CHUNK];
    float largest[MAX_GROUP], total[MAX_GROUP];
    const bf16 *keys[CHUNK], *values[CHUNK];
    const int32_t *table = a->table + row * a->table_width;
    const bf16 *k_cache = a->k_cache + kv_head * dim, *v_cache = a->v_cache + kv_head * v_dim;
    bf16 *out = a->out + (row * a->heads + kv_head * group) * v_dim;
    if (length <= 0) {
        memset(out, 0, group * v_dim * sizeof(bf16));
        return;
    }
    for (int64_t g = 0; g < group; g++) {
        const bf16 *restrict x = a->q + (row * a->heads + kv_head * group + g) * dim;
        for (int64_t i = 0; i < dim; i++)
            q[g][i] = wide(x[i]) * a->scale;
        memset(sums[g], 0, v_dim * sizeof(float));
        largest[g] = -__builtin_inff();
        total[g] = 0.0f;
    }
    int64_t start = 0;
    if (a->window > 0)
        start = length > a->window ? length - a->window : 0;
    else if (a->chunk > 0)
        start = (length - 1) / a->chunk * a->chunk;
    for (; start < length; start += CHUNK) {
        int64_t n = length - start < CHUNK ? length - start : CHUNK;
        for (int64_t t = 0; t < n; t++) {
            keys[t] = at(k_cache, a->k_block, a->k_slot, table, block_size, start + t);
            values[t] = at(v_cache, a->v_block, a->v_slot, table, block_size, start + t);
            fetch(keys[t], dim);
        }
        for (int64_t t = 0; t < n; t++) {
            const bf16 *restrict k = keys[t];
            fetch(values[t], v_dim);
            for (int64_t g = 0; g < group; g++) {
                float dot = 0.0f;
                for (int64_t i = 0; i < dim; i++)
                    dot += q[g][i] * wide(k[i]);
                weights[g][t] = dot;
            }
        }
        for (int64_t g = 0; g < group; g++) {
            float most = largest[g];
            for (int64_t t = 0; t < n; t++)
                most = weights[g][t] > most ? weights[g][t] : most;
            float shrink = largest[g] == most ? 1.0f : exponential(largest[g] - most), sum = 0.0f;
            for (int64_t t = 0; t < n; t++) {
                weights[g][t] = exponential(weights[g][t] - most);
                sum += weights[g][t];
            }
            total[g] = total[g] * shrink + sum;
            largest[g] = most;
            for (int64_t i = 0; i < v_dim; i++)
                sums[g][i] *= shrink;
            int64_t t = 0;
            for (; t + 4 <= n; t += 4) {
                const bf16 *restrict v0 = values[t], *restrict v1 = values[t + 1], *restrict v2 = values[t + 2],
                           *restrict v3 = values[t + 3];
                float w0 = weights[g][t], w1 = weights[g][t + 1], w2 = weights[g][t + 2], w3 = weights[g][t + 3];
                for (int64_t i = 0; i < v_dim; i++)
                    sums[g][i] += w0 * wide(v0[i]) + w1 * wide(v1[i]) + w2 * wide(v2[i]) + w3 * wide(v3[i]);
            }
            for (; t < n; t++)
                for (int64_t i = 0; i < v_dim; i++)
                    sums[g][i] += weights[g][t] * wide(values[t][i]);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < v_dim; i++)
            out[g * v_dim + i] = narrow(sums[g][i] / total[g]);
}

static void attend_range(const void *data, int64_t first, int64_t last)
{
    const Attention *a = data;
    for (int64_t i = first; i < last; i++)
        attend_head(a, i / a->kv_heads, i % a->kv_heads);
}

/* q: [rows, heads, dim]; caches: [blocks, block_size, kv_heads, dim or v_dim] with strides of blocks and slots;
 * lengths: [rows], 0 gives zeros; table: [rows, table_width]; out: [rows, heads, v_dim]. A row sees its last `window`
 * tokens, or those since the last multiple of `chunk`; both 0: all. longest: a bound of lengths. */
void attend(const bf16 *q, const bf16 *k_cache, const bf16 *v_cache, bf16 *out, const int32_t *lengths,
            const int32_t *table, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t v_dim,
            int64_t table_width, int64_t block_size, int64_t k_block, int64_t k_slot, int64_t v_block, int64_t v_slot,
            int64_t window, int64_t chunk, int64_t longest, float scale)
{
    Attention args = {q,          k_cache,    v_cache, out,    lengths, table,  heads,  kv_heads, dim,  v_dim,
                      table_width, block_size, k_block, k_slot, v_block, v_slot, window, chunk,    scale};
    share(attend_range, &args, rows * kv_heads, longest * dim * 2);
}

/* ---- integers of W8A8 ---- */

typedef struct {
    const bf16 *x;
    uint8_t *values;
    float *scales;
    int64_t dim;
    float least;
} Round;

static void round_rows(const void *data, int64_t first, int64_t last)
{
    const Round *a = data;
    int64_t dim = a->dim;
    for (int64_t row = first; row < last; row++) {
        const bf16 *restrict x = a->x + row * dim;
        uint8_t *restrict values = a->values + row * dim;
        int32_t most = 0; /* magnitudes of bf16 are ordered as their bits are, those that are not finite last */
        for (int64_t i = 0; i < dim; i++) {
            int32_t bits = x[i] & 0x7fff;
            most = bits > most ? bits : most;
        }
        float scale = wide((bf16)most) * (1.0f / 127.0f);
        scale = scale < a->least ? a->least : scale;
        a->scales[row] = scale;
        for (int64_t i = 0; i < dim; i++) {
            float value = __builtin_rintf(wide(x[i]) / scale);
            value = value < 127.0f ? value : 127.0f;
            value = value > -127.0f ? value : -127.0f;
            values[i] = (uint8_t)((int32_t)value + 128);
        }
    }
}

/* x: [rows, dim]; values: [rows, dim], each number divided by its row's scale and rounded, + 128; scales: [rows] fp32,
 * at least `least`. A row that is not finite has a scale that is not. */
void quantize_rows(const bf16 *x, uint8_t *values, float *scales, int64_t rows, int64_t dim, float least)
{
    Round args = {x, values, scales, dim, least};
    share(round_rows, &args, rows, dim);
}

typedef struct {
    const float *sums, *scales;
    const bf16 *bias;
    bf16 *out;
    int64_t dim;
} Scale;

static void scale_rows(const void *data, int64_t first, int64_t last)
{
    const Scale *a = data;
    int64_t dim = a->dim;
    for (int64_t row = first; row < last; row++) {
        const float *restrict sums = a->sums + row * dim;
        const bf16 *restrict bias = a->bias;
        bf16 *restrict out = a->out + row * dim;
        float scale = a->scales[row];
        if (bias)
            for (int64_t i = 0; i < dim; i++)
                out[i] = narrow(sums[i] * scale + wide(bias[i]));
        else
            for (int64_t i = 0; i < dim; i++)
                out[i] = narrow(sums[i] * scale);
    }
}

/* sums: [rows, dim] fp32; scales: [rows] fp32; bias: [dim] or NULL; out: [rows, dim], sums * scale + bias. */
void scale_sums(const float *sums, const float *scales, const bf16 *bias, bf16 *out, int64_t rows, int64_t dim)
{
    Scale args = {sums, scales, bias, out, dim};
    share(scale_rows, &args, rows, dim);
}

/* ---- 4-bit weights ---- */

enum { OUTPUTS = 64 }; /* of a block of torch's order on a CPU with AVX-512 */

typedef struct {
    const uint8_t *packed;
    const bf16 *scales_zeros;
    bf16 *out;
    int64_t n, k, group;
} Unpack;

static void unpack_blocks(const void *data, int64_t first, int64_t last)
{
    const Unpack *a = data;
    float scales[OUTPUTS], zeros[OUTPUTS];
    for (int64_t block = first; block < last; block++) {
        const uint8_t *restrict packed = a->packed + block * a->k * (OUTPUTS / 2);
        bf16 *restrict out = a->out + block * OUTPUTS;
        for (int64_t k = 0; k < a->k; k++, packed += OUTPUTS / 2, out += a->n) {
            if (k % a->group == 0) {
                const bf16 *pairs = a->scales_zeros + (k / a->group * a->n + block * OUTPUTS) * 2;
                for (int64_t i = 0; i < OUTPUTS; i++) {
                    scales[i] = wide(pairs[2 * i]);
                    zeros[i] = wide(pairs[2 * i + 1]);
                }
            }
            for (int64_t i = 0; i < OUTPUTS / 2; i++) {
                out[i] = narrow((float)((packed[i] & 15) - 8) * scales[i] + zeros[i]);
                out[i + OUTPUTS / 2] =
                    narrow((float)((packed[i] >> 4) - 8) * scales[i + OUTPUTS / 2] + zeros[i + OUTPUTS / 2]);
            }
        }
    }
}

/* packed: [n / 64, k, 32], each byte of one input of outputs i and i + 32; scales_zeros: [k / group, n, 2];
 * out: [k, n], (value - 8) * scale + zero. */
void unpack_int4(const uint8_t *packed, const bf16 *scales_zeros, bf16 *out, int64_t n, int64_t k, int64_t group)
{
    Unpack args = {packed, scales_zeros, out, n, k, group};
    share(unpack_blocks, &args, n / OUTPUTS, OUTPUTS * k);
}
