/* Products of few rows with a matrix that is read once, at the rate of the memory.
 *
 * kernels/linear/onednn.py and kernels/linear/int4_cpu.py are the specifications, and pack the matrices: in the orders of
 * oneDNN (bf16, bytes) and of torch (4 bits), which products of many rows read too. Blocks of outputs lie one behind the
 * other, and each is read from its begin to its end. Without AVX-512 in BF16 and VNNI there are none of these functions:
 * has_products says so.
 */

#include "threads.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__)

#include <immintrin.h>

enum {
    LANES = 16,      /* outputs of a vector */
    AHEAD = 2048,    /* bytes that are fetched before they are read: the hardware stops at the end of a page */
    INT4_ROWS = 4,   /* that share what unpacking costs */
    INT4_GROUP = 256 /* inputs of a group, at most */
};

int64_t has_products(void) { return 1; }

static inline __attribute__((always_inline)) void store(bf16 *out, __m512 x)
{
    _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh(x));
}

static inline __attribute__((always_inline)) __m512 widen(const bf16 *x)
{
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
}

/* ---- bf16 and bytes: matrices in [blocks, inputs / a word's, width, a word's], words of 32 bits ---- */

typedef struct {
    const char *x, *w;
    const bf16 *bias;
    bf16 *out;
    int64_t rows, n, words, width; /* words: of a row of x */
    /* of bytes alone */
    const float *row_scales, *scales;
    const int32_t *sums;
} Product;

/* R rows of x with C vectors of outputs, from number `column` of the block on. Rows behind the last one are the last. */
static inline __attribute__((always_inline)) void tile(const Product *a, int64_t block, int64_t row, int64_t column,
                                                       const int R, const int C, const int is_bytes)
{
    const char *w = a->w + (block * a->words * a->width + column) * 4;
    const char *x[8];
    const int64_t stride = a->width * 4;
    __m512i sums[8][4];
    for (int r = 0; r < R; r++) {
        x[r] = a->x + (row + r < a->rows ? row + r : a->rows - 1) * a->words * 4;
        for (int c = 0; c < C; c++)
            sums[r][c] = _mm512_setzero_si512();
    }
    for (int64_t i = 0; i < a->words; i++, w += stride) {
        __m512i weights[4];
        for (int c = 0; c < C; c++) {
            weights[c] = _mm512_loadu_si512(w + c * 64);
            _mm_prefetch(w + c * 64 + AHEAD, _MM_HINT_T0);
        }
        for (int r = 0; r < R; r++) {
            int32_t word;
            memcpy(&word, x[r] + i * 4, 4);
            __m512i inputs = _mm512_set1_epi32(word);
            for (int c = 0; c < C; c++)
                sums[r][c] = is_bytes ? _mm512_dpbusd_epi32(sums[r][c], inputs, weights[c])
                                      : (__m512i)_mm512_dpbf16_ps((__m512)sums[r][c], (__m512bh)inputs,
                                                                  (__m512bh)weights[c]);
        }
    }
    int64_t first = block * a->width + column;
    for (int c = 0; c < C; c++) {
        int64_t n = first + c * LANES;
        for (int r = 0; r < R && row + r < a->rows; r++) {
            __m512 sum = (__m512)sums[r][c];
            if (is_bytes) { /* inputs are 128 too large */
                __m512i extra = _mm512_slli_epi32(_mm512_loadu_si512(a->sums + n), 7);
                sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r][c], extra));
                sum = _mm512_mul_ps(sum, _mm512_loadu_ps(a->scales + n));
                __asm__("" : "+v"(sum)); /* both factors in this order, as oneDNN and then torch multiply */
                sum = _mm512_mul_ps(sum, _mm512_set1_ps(a->row_scales[row + r]));
            }
            if (a->bias)
                sum = _mm512_add_ps(sum, widen(a->bias + n));
            store(a->out + (row + r) * a->n + n, sum);
        }
    }
}

/* A block with R rows, 64 outputs at once up to four rows and 32 beyond: the sums stay in registers. */
static inline __attribute__((always_inline)) void tiles(const Product *a, int64_t block, int64_t row, const int R,
                                                        const int is_bytes)
{
    int64_t column = 0;
    for (; R <= 4 && column + 4 * LANES <= a->width; column += 4 * LANES)
        tile(a, block, row, column, R, 4, is_bytes);
    for (; column + 2 * LANES <= a->width; column += 2 * LANES)
        tile(a, block, row, column, R, 2, is_bytes);
    for (; column < a->width; column += LANES)
        tile(a, block, row, column, R, 1, is_bytes);
}

static inline __attribute__((always_inline)) void blocks(const Product *a, int64_t first, int64_t last,
                                                         const int is_bytes)
{
    for (int64_t block = first; block < last; block++)
        for (int64_t row = 0; row < a->rows; row += 8) {
            int64_t rows = a->rows - row;
            if (rows == 1)
                tiles(a, block, row, 1, is_bytes);
            else if (rows == 2)
                tiles(a, block, row, 2, is_bytes);
            else if (rows <= 4)
                tiles(a, block, row, 4, is_bytes);
            else
                tiles(a, block, row, 8, is_bytes);
        }
}

static void bf16_blocks(const void *data, int64_t first, int64_t last) { blocks(data, first, last, 0); }

static void byte_blocks(const void *data, int64_t first, int64_t last) { blocks(data, first, last, 1); }

/* x: [rows, k]; w: [n / width, k / 2, width, 2]; bias: [n] or NULL; out: [rows, n]. width is a multiple of 16, k even. */
void bf16_linear(const bf16 *x, const bf16 *w, const bf16 *bias, bf16 *out, int64_t rows, int64_t n, int64_t k,
                 int64_t width)
{
    Product args = {(const char *)x, (const char *)w, bias, out, rows, n, k / 2, width, 0, 0, 0};
    share_in_turns(bf16_blocks, &args, n / width, k * width);
}

/* x: [rows, k], integers + 128; w: [n / width, k / 4, width, 4] signed; sums: [n], of each output's weights; scales: [n],
 * row_scales: [rows], fp32; bias: [n] bf16 or NULL; out: [rows, n]. */
void int8_linear(const uint8_t *x, const int8_t *w, const bf16 *bias, bf16 *out, const float *row_scales,
                 const float *scales, const int32_t *sums, int64_t rows, int64_t n, int64_t k, int64_t width)
{
    Product args = {(const char *)x, (const char *)w, bias, out, rows, n, k / 4, width, row_scales, scales, sums};
    share_in_turns(byte_blocks, &args, n / width, k * width);
}

/* ---- 4 bits ---- */

typedef struct {
    const bf16 *x, *bias;
    const uint8_t *w;
    const bf16 *scales_zeros;
    bf16 *out;
    int64_t rows, n, k, group;
} Int4;

/* R rows of x with the 64 outputs of a block, as tile(). Each group's sums of x * (value - 8) are scaled once. */
static inline __attribute__((always_inline)) void int4_tile(const Int4 *a, int64_t block, int64_t row, const int R)
{
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const uint8_t *w = a->w + block * a->k * 32;
    const bf16 *rows[INT4_ROWS];
    float x[INT4_ROWS][INT4_GROUP];
    __m512 sums[INT4_ROWS][4];
    for (int r = 0; r < R; r++) {
        rows[r] = a->x + (row + r < a->rows ? row + r : a->rows - 1) * a->k;
        for (int c = 0; c < 4; c++)
            sums[r][c] = _mm512_setzero_ps();
    }
    for (int64_t start = 0; start < a->k; start += a->group) {
        __m512 parts[INT4_ROWS][4], inputs[INT4_ROWS];
        for (int r = 0; r < R; r++) {
            inputs[r] = _mm512_setzero_ps();
            for (int64_t i = 0; i < a->group; i += LANES) {
                __m512 some = widen(rows[r] + start + i);
                _mm512_storeu_ps(x[r] + i, some);
                inputs[r] = _mm512_add_ps(inputs[r], some);
            }
            for (int c = 0; c < 4; c++)
                parts[r][c] = _mm512_setzero_ps();
        }
        for (int64_t i = 0; i < a->group; i++, w += 32) {
            __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)w));
            __m512i high = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w + 16)));
            __m512 weights[4] = {_mm512_permutexvar_ps(low, values), _mm512_permutexvar_ps(high, values),
                                 _mm512_permutexvar_ps(_mm512_srli_epi32(low, 4), values),
                                 _mm512_permutexvar_ps(_mm512_srli_epi32(high, 4), values)};
            _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
            for (int r = 0; r < R; r++)
                for (int c = 0; c < 4; c++)
                    parts[r][c] = _mm512_fmadd_ps(_mm512_set1_ps(x[r][i]), weights[c], parts[r][c]);
        }
        const bf16 *pairs = a->scales_zeros + (start / a->group * a->n + block * 64) * 2;
        for (int c = 0; c < 4; c++) {
            __m512i pair = _mm512_loadu_si512(pairs + c * 2 * LANES);
            __m512 scales = (__m512)_mm512_slli_epi32(pair, 16);
            __m512 zeros = (__m512)_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000));
            for (int r = 0; r < R; r++) {
                sums[r][c] = _mm512_fmadd_ps(parts[r][c], scales, sums[r][c]);
                sums[r][c] = _mm512_fmadd_ps(_mm512_set1_ps(_mm512_reduce_add_ps(inputs[r])), zeros, sums[r][c]);
            }
        }
    }
    for (int c = 0; c < 4; c++) {
        int64_t n = block * 64 + c * LANES;
        for (int r = 0; r < R && row + r < a->rows; r++)
            store(a->out + (row + r) * a->n + n, a->bias ? _mm512_add_ps(sums[r][c], widen(a->bias + n)) : sums[r][c]);
    }
}

static void int4_blocks(const void *data, int64_t first, int64_t last)
{
    const Int4 *a = data;
    for (int64_t block = first; block < last; block++)
        for (int64_t row = 0; row < a->rows; row += INT4_ROWS)
            if (a->rows - row == 1)
                int4_tile(a, block, row, 1);
            else if (a->rows - row == 2)
                int4_tile(a, block, row, 2);
            else
                int4_tile(a, block, row, INT4_ROWS);
}

/* x: [rows, k]; w: [n / 64, k, 32], each byte of one input of outputs i and i + 32; scales_zeros: [k / group, n, 2];
 * bias: [n] or NULL; out: [rows, n]. group: a multiple of 16, 256 at most. */
void int4_linear(const bf16 *x, const uint8_t *w, const bf16 *scales_zeros, const bf16 *bias, bf16 *out, int64_t rows,
                 int64_t n, int64_t k, int64_t group)
{
    Int4 args = {x, bias, w, scales_zeros, out, rows, n, k, group};
    share_in_turns(int4_blocks, &args, n / 64, k * 64);
}

#else

int64_t has_products(void) { return 0; }

#endif
