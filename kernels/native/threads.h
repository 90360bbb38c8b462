/* Numbers of 16 bits, the threads on which the functions of this folder run, and those that call each other. */

#ifndef QUIRE_THREADS_H
#define QUIRE_THREADS_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

/* products.c, prompts.c and layers.c are for CPUs with these */
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_PRODUCTS 1
#else
#define HAS_PRODUCTS 0
#endif

/* A part of the work: items first to last of what args describes. */
typedef void (*Range)(const void *args, int64_t first, int64_t last);

/* Run n items, of `each` numbers each, in equal shares: on one thread if there are too few to wake another. */
__attribute__((visibility("hidden"))) void share(Range run, const void *args, int64_t n, int64_t each);

/* The same, but a thread takes the next item when it is done with one: a core that other programs use takes fewer. */
__attribute__((visibility("hidden"))) void share_in_turns(Range run, const void *args, int64_t n, int64_t each);

static inline float wide(bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

/* Round to nearest even; NaN stays NaN. */
static inline bf16 narrow(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* rows.c */
void rms_norm(const bf16 *x, const bf16 *residual, const bf16 *weight, bf16 *out, bf16 *sum, int64_t rows, int64_t dim,
              float eps);
void silu_and_mul(const bf16 *x, bf16 *out, int64_t rows, int64_t dim);
void norm_rope_write_kv(const bf16 *qkv, const bf16 *q_weight, const bf16 *k_weight, const int64_t *positions,
                        const int64_t *slots, const void *turns, bf16 *q, bf16 *k_cache, bf16 *v_cache, int64_t rows,
                        int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, int64_t k_block,
                        int64_t k_slot, int64_t v_block, int64_t v_slot, int64_t wide_turns, float eps);
void attend(const bf16 *q, const bf16 *k_cache, const bf16 *v_cache, bf16 *out, const int32_t *lengths,
            const int32_t *table, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t v_dim,
            int64_t table_width, int64_t block_size, int64_t k_block, int64_t k_slot, int64_t v_block, int64_t v_slot,
            int64_t window, int64_t chunk, int64_t longest, float scale);
void quantize_rows(const bf16 *x, uint8_t *values, float *scales, int64_t rows, int64_t dim, float least);

/* products.c */
void bf16_linear(const bf16 *x, const bf16 *w, const bf16 *bias, bf16 *out, int64_t rows, int64_t n, int64_t k,
                 int64_t width);
void rounded_int8_linear(const bf16 *x, const int8_t *w, const bf16 *bias, bf16 *out, uint8_t *values,
                         float *row_scales, const float *scales, const int32_t *sums, int64_t rows, int64_t n,
                         int64_t k, int64_t width, float least);
void int4_linear(const bf16 *x, const uint8_t *w, const bf16 *scales_zeros, const bf16 *bias, bf16 *out, int64_t rows,
                 int64_t n, int64_t k, int64_t group);

#endif
