/* Products of few rows with a matrix that is read once, at the rate of the memory, and of many at that of the core.
 *
 * kernels/linear/onednn.py and kernels/linear/int4_cpu.py are the specifications, and pack the matrices: in the orders of
 * oneDNN (bf16, bytes) and of torch (4 bits), which products of many rows read too. Blocks of outputs lie one behind the
 * other, and each is read from its begin to its end. Without AVX-512 in BF16 and VNNI there are none of these functions:
 * use_products says so.
 */

#include "threads.h"

#include <stdlib.h>

#if HAS_PRODUCTS

#include <immintrin.h>

enum {
    LANES = 16,      /* outputs of a vector */
    AHEAD = 2048,    /* bytes that are fetched before they are read: the hardware stops at the end of a page */
    MANY = 6,        /* rows of a tile with 64 outputs */
    INT4_ROWS = 4,   /* that share what unpacking costs */
    INT4_PACKED_ROWS = 31, /* most for which a block is not unpacked as a whole, without tiles */
    INT4_AHEAD = 256 /* inputs whose scales are fetched before they are read: of a group at most */
};

static int has_tiles; /* AMX: products of 16 rows, 16 outputs and 64 bytes of inputs at a time */

static inline __attribute__((always_inline)) void store(bf16 *out, __m512 x)
{
    _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh(x));
}

static inline __attribute__((always_inline)) __m512 widen(const bf16 *x)
{
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
}

static inline __attribute__((always_inline)) __m512 scale_bytes(__m512i sums, const int32_t *extra, const float *scales,
                                                                float row_scale)
{
    /* inputs are 128 too large */
    __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, _mm512_slli_epi32(_mm512_loadu_si512(extra), 7)));
    sum = _mm512_mul_ps(sum, _mm512_loadu_ps(scales));
    __asm__("" : "+v"(sum)); /* both factors in this order, as oneDNN and then torch multiply */
    return _mm512_mul_ps(sum, _mm512_set1_ps(row_scale));
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

/* Add the products of pairs of bf16 to sums in fp32, or of fours of bytes to sums of 32 bits. The compiler's own
 * functions have other types: with casts gcc 12 keeps the sums of a tile in memory. */
static inline __attribute__((always_inline)) __m512i add_pairs(__m512i sums, __m512i x, __m512i w)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(x), "v"(w));
    return sums;
}

static inline __attribute__((always_inline)) __m512i add_bytes(__m512i sums, __m512i x, __m512i w)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(x), "v"(w));
    return sums;
}

/* Scale, add the bias, round and store the sums of a row with 16 outputs from n on. */
static inline __attribute__((always_inline)) void finish(const Product *a, int64_t row, int64_t n, __m512i sums,
                                                         const int is_bytes)
{
    __m512 sum = is_bytes ? scale_bytes(sums, a->sums + n, a->scales + n, a->row_scales[row]) : (__m512)sums;
    if (a->bias)
        sum = _mm512_add_ps(sum, widen(a->bias + n));
    store(a->out + row * a->n + n, sum);
}

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
                sums[r][c] = is_bytes ? add_bytes(sums[r][c], inputs, weights[c])
                                      : add_pairs(sums[r][c], inputs, weights[c]);
        }
    }
    int64_t first = block * a->width + column;
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R && row + r < a->rows; r++)
            finish(a, row + r, first + c * LANES, sums[r][c], is_bytes);
}

/* A block with R rows, 64 outputs at once up to MANY rows and 32 beyond: the sums stay in registers. */
static inline __attribute__((always_inline)) void tiles(const Product *a, int64_t block, int64_t row, const int R,
                                                        const int is_bytes)
{
    int64_t column = 0;
    for (; R <= MANY && column + 4 * LANES <= a->width; column += 4 * LANES)
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
        for (int64_t row = 0, rows; (rows = a->rows - row) > 0; row += rows > 8 ? MANY : 8) {
            if (rows > 8)
                tiles(a, block, row, MANY, is_bytes);
            else if (rows == 1)
                tiles(a, block, row, 1, is_bytes);
            else if (rows == 2)
                tiles(a, block, row, 2, is_bytes);
            else if (rows <= 4)
                tiles(a, block, row, 4, is_bytes);
            else
                tiles(a, block, row, 8, is_bytes);
        }
}

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

enum { TILE = 16 }; /* rows of x, outputs, and words of both */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

/* gcc 12's own functions for this name 8 of the 64 bytes, so that it may keep the others elsewhere. */
static inline void load_tiles(const Tiles *tiles) { __asm__ volatile("ldtilecfg %0" ::"m"(*tiles)); }

static inline void store_tiles(Tiles *tiles) { __asm__ volatile("sttilecfg %0" : "=m"(*tiles)); }

/* TILE rows of x from `row` on, and up to as many behind them, with C tiles of outputs. In registers: sums in 0 to 3,
 * rows of x in 4 and 5, weights in 6 and 7. */
static inline __attribute__((always_inline)) void amx_tile(const Product *a, int64_t block, int64_t row, int64_t column,
                                                           const int C, const int is_bytes)
{
    const char *x = a->x + row * a->words * 4;
    const char *w = a->w + (block * a->words * a->width + column) * 4;
    const int64_t stride = a->width * 4, x_stride = a->words * 4;
    const int is_tall = a->rows > TILE;
    int32_t sums[2][2][TILE][LANES];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < a->words; i += TILE, w += TILE * stride) {
        for (int j = 0; j < TILE; j++)
            for (int c = 0; c < C; c++)
                _mm_prefetch(w + (TILE + j) * stride + c * 64, _MM_HINT_T0);
        _tile_loadd(4, x + i * 4, x_stride);
        _tile_loadd(6, w, stride);
        if (C == 2)
            _tile_loadd(7, w + 64, stride);
        if (is_bytes)
            _tile_dpbusd(0, 4, 6);
        else
            _tile_dpbf16ps(0, 4, 6);
        if (C == 2 && is_bytes)
            _tile_dpbusd(1, 4, 7);
        else if (C == 2)
            _tile_dpbf16ps(1, 4, 7);
        if (!is_tall)
            continue;
        _tile_loadd(5, x + TILE * x_stride + i * 4, x_stride);
        if (is_bytes)
            _tile_dpbusd(2, 5, 6);
        else
            _tile_dpbf16ps(2, 5, 6);
        if (C == 2 && is_bytes)
            _tile_dpbusd(3, 5, 7);
        else if (C == 2)
            _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if (is_tall) {
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
    }
    for (int64_t r = 0; r < 2 * TILE && row + r < a->rows; r++)
        for (int c = 0; c < C; c++)
            finish(a, row + r, block * a->width + column + c * LANES, _mm512_loadu_si512(sums[r / TILE][c][r % TILE]),
                   is_bytes);
}

/* All rows with some blocks; words is a multiple of TILE. The last 2 * TILE of many rows may overlap those before. The
 * caller's tiles are as they were, but empty. */
static inline __attribute__((always_inline)) void amx_blocks(const Product *a, int64_t first, int64_t last,
                                                             const int is_bytes)
{
    Tiles before, tiles;
    memset(&tiles, 0, sizeof tiles);
    tiles.palette = 1;
    int64_t rows[2] = {a->rows < TILE ? a->rows : TILE, a->rows < 2 * TILE ? a->rows - TILE : TILE};
    rows[1] = rows[1] < 1 ? 1 : rows[1];
    const int sizes[8] = {rows[0], rows[0], rows[1], rows[1], rows[0], rows[1], TILE, TILE};
    for (int i = 0; i < 8; i++) {
        tiles.bytes[i] = 64;
        tiles.rows[i] = sizes[i];
    }
    store_tiles(&before);
    load_tiles(&tiles);
    for (int64_t block = first; block < last; block++)
        for (int64_t row = 0; row < a->rows; row += 2 * TILE) {
            int64_t from = row && row + 2 * TILE > a->rows ? a->rows - 2 * TILE : row, column = 0;
            for (; column + 2 * LANES <= a->width; column += 2 * LANES)
                amx_tile(a, block, from, column, 2, is_bytes);
            for (; column < a->width; column += LANES)
                amx_tile(a, block, from, column, 1, is_bytes);
        }
    if (before.palette)
        load_tiles(&before);
    else
        _tile_release();
}

static int takes_tiles(const Product *a) { return has_tiles && a->words % TILE == 0; }

#include <sys/syscall.h>
#include <unistd.h>

/* Ask Linux for the registers; without them there are tiles in no thread. */
static int request_tiles(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#else

static inline void amx_blocks(const Product *a, int64_t first, int64_t last, int is_bytes)
{
    (void)a, (void)first, (void)last, (void)is_bytes;
}

static int takes_tiles(const Product *a) { return (void)a, has_tiles; }

static int request_tiles(void) { return 0; }

#endif

/* Use products up to a level, and return it: 0: there are none; 1: by AVX-512; 2: by AMX, too. Before all others. */
int64_t use_products(int64_t most)
{
    has_tiles = most > 1 && request_tiles();
    return 1 + has_tiles;
}

static void bf16_blocks(const void *data, int64_t first, int64_t last)
{
    if (takes_tiles(data))
        amx_blocks(data, first, last, 0);
    else
        blocks(data, first, last, 0);
}

static void byte_blocks(const void *data, int64_t first, int64_t last)
{
    if (takes_tiles(data))
        amx_blocks(data, first, last, 1);
    else
        blocks(data, first, last, 1);
}

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

/* As int8_linear, of x: [rows, k] bf16, whose rows are rounded here (rows.c: quantize_rows). values: [rows, k] and
 * row_scales: [rows] are scratch. */
void rounded_int8_linear(const bf16 *x, const int8_t *w, const bf16 *bias, bf16 *out, uint8_t *values,
                         float *row_scales, const float *scales, const int32_t *sums, int64_t rows, int64_t n,
                         int64_t k, int64_t width, float least)
{
    quantize_rows(x, values, row_scales, rows, k, least);
    int8_linear(values, w, bias, out, row_scales, scales, sums, rows, n, k, width);
}

/* ---- 4 bits ---- */

typedef struct {
    const bf16 *x, *bias;
    const uint8_t *w;
    const bf16 *scales_zeros;
    bf16 *out;
    int64_t rows, n, k, group;
} Int4;

/* Return a group's scales and zeros in a block, [64, 2], and fetch those of a later one, of the next block behind the last
 * of this: each lies in a page of its own, which no hardware foresees. */
static inline __attribute__((always_inline)) const bf16 *pairs_ahead(const Int4 *a, int64_t block, int64_t start)
{
    int64_t later = start + INT4_AHEAD, next = block;
    if (later >= a->k) {
        later -= a->k;
        next++;
    }
    const char *ahead = (const char *)(a->scales_zeros + (later / a->group * a->n + next * 64) * 2);
    for (int c = 0; c < 4; c++)
        _mm_prefetch(ahead + c * 64, _MM_HINT_T0);
    return a->scales_zeros + (start / a->group * a->n + block * 64) * 2;
}

/* -8 to 7 in bf16, twice: the fifth bit of an index is another code's. */
static const bf16 INT4_VALUES[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0,
    0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0};

/* R rows of x with the 64 outputs of a block, as tile(), two inputs at once. Each group's sums of x * (value - 8) are
 * scaled once. Vectors of outputs, here only: 0, 2 … 30; 1, 3 … 31; 32, 34 … 62; 33, 35 … 63. */
static inline __attribute__((always_inline)) void int4_tile(const Int4 *a, int64_t block, int64_t row, const int R)
{
    const __m512i values = _mm512_loadu_si512(INT4_VALUES), ones = _mm512_set1_epi16(0x3f80);
    int16_t order[32]; /* two outputs of an input, then the same two of the next */
    int32_t evens[LANES], firsts[LANES];
    for (int i = 0; i < LANES; i++) {
        order[2 * i] = i;
        order[2 * i + 1] = LANES + i;
        evens[i] = 2 * i;
        firsts[i] = i / 2 + i % 2 * LANES;
    }
    const __m512i pairs_of = _mm512_loadu_si512(order), even = _mm512_loadu_si512(evens);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512i first = _mm512_loadu_si512(firsts), last = _mm512_add_epi32(first, _mm512_set1_epi32(LANES / 2));
    const uint8_t *w = a->w + block * a->k * 32;
    const bf16 *x[INT4_ROWS];
    __m512 sums[INT4_ROWS][4];
    for (int r = 0; r < R; r++) {
        x[r] = a->x + (row + r < a->rows ? row + r : a->rows - 1) * a->k;
        for (int c = 0; c < 4; c++)
            sums[r][c] = _mm512_setzero_ps();
    }
    for (int64_t start = 0; start < a->k; start += a->group) {
        __m512 parts[INT4_ROWS][4];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < 4; c++)
                parts[r][c] = _mm512_setzero_ps();
        const bf16 *pairs = pairs_ahead(a, block, start);
        for (int64_t i = start; i < start + a->group; i += 2, w += 64) {
            __m512i codes = _mm512_permutexvar_epi16(pairs_of, _mm512_loadu_si512(w));
            __m512i weights[4] = {_mm512_permutexvar_epi16(codes, values),
                                  _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), values),
                                  _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), values),
                                  _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), values)};
            _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
            for (int r = 0; r < R; r++) {
                int32_t two;
                memcpy(&two, x[r] + i, 4);
                for (int c = 0; c < 4; c++)
                    parts[r][c] = _mm512_dpbf16_ps(parts[r][c], (__m512bh)_mm512_set1_epi32(two), (__m512bh)weights[c]);
            }
        }
        __m512 inputs[INT4_ROWS];
        for (int r = 0; r < R; r++) {
            inputs[r] = _mm512_setzero_ps();
            for (int64_t i = start; i < start + a->group; i += 2 * LANES)
                inputs[r] = _mm512_dpbf16_ps(inputs[r], (__m512bh)_mm512_loadu_si512(x[r] + i), (__m512bh)ones);
            inputs[r] = _mm512_set1_ps(_mm512_reduce_add_ps(inputs[r]));
        }
        for (int half = 0; half < 2; half++) {
            __m512i low = _mm512_loadu_si512(pairs + half * 4 * LANES);
            __m512i high = _mm512_loadu_si512(pairs + half * 4 * LANES + 2 * LANES);
            for (int c = 2 * half; c < 2 * half + 2; c++) {
                __m512i pair = _mm512_permutex2var_epi32(low, c % 2 ? odd : even, high);
                __m512 scales = (__m512)_mm512_slli_epi32(pair, 16);
                __m512 zeros = (__m512)_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000));
                for (int r = 0; r < R; r++) {
                    sums[r][c] = _mm512_fmadd_ps(parts[r][c], scales, sums[r][c]);
                    sums[r][c] = _mm512_fmadd_ps(inputs[r], zeros, sums[r][c]);
                }
            }
        }
    }
    for (int c = 0; c < 4; c++) {
        int64_t n = block * 64 + c * LANES;
        for (int r = 0; r < R && row + r < a->rows; r++) {
            __m512 sum = _mm512_permutex2var_ps(sums[r][c / 2 * 2], c % 2 ? last : first, sums[r][c / 2 * 2 + 1]);
            store(a->out + (row + r) * a->n + n, a->bias ? _mm512_add_ps(sum, widen(a->bias + n)) : sum);
        }
    }
}

/* Write the weights of a block, each rounded to bf16, as a block of 64 outputs of a bf16 matrix: [k / 2, 64, 2]. */
static void unpack_block(const Int4 *a, int64_t block, bf16 *out)
{
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const uint8_t *w = a->w + block * a->k * 32;
    int16_t order[32]; /* of two inputs, one behind the other, to pairs */
    for (int i = 0; i < 32; i++)
        order[i] = i / 2 + i % 2 * LANES;
    __m512i pairs_of = _mm512_loadu_si512(order);
    for (int64_t start = 0; start < a->k; start += a->group) {
        const bf16 *pairs = pairs_ahead(a, block, start);
        __m512 scales[4], zeros[4];
        for (int c = 0; c < 4; c++) {
            __m512i pair = _mm512_loadu_si512(pairs + c * 2 * LANES);
            scales[c] = (__m512)_mm512_slli_epi32(pair, 16);
            zeros[c] = (__m512)_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000));
        }
        for (int64_t i = 0; i < a->group; i += 2, w += 64, out += 128) {
            __m512 numbers[2][4];
            _mm_prefetch((const char *)w + AHEAD, _MM_HINT_T0);
            for (int j = 0; j < 2; j++) {
                __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w + j * 32)));
                __m512i high = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w + j * 32 + 16)));
                numbers[j][0] = _mm512_permutexvar_ps(low, values);
                numbers[j][1] = _mm512_permutexvar_ps(high, values);
                numbers[j][2] = _mm512_permutexvar_ps(_mm512_srli_epi32(low, 4), values);
                numbers[j][3] = _mm512_permutexvar_ps(_mm512_srli_epi32(high, 4), values);
            }
            for (int c = 0; c < 4; c++) {
                __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(numbers[1][c], scales[c], zeros[c]),
                                                            _mm512_fmadd_ps(numbers[0][c], scales[c], zeros[c]));
                _mm512_storeu_si512(out + c * 2 * LANES, _mm512_permutexvar_epi16(pairs_of, both));
            }
        }
    }
}

/* A block that is unpacked once for all rows; false if there is no memory, or too few rows. */
static int unpacked_block(const Int4 *a, int64_t block)
{
    Product product = {(const char *)a->x, 0, a->bias ? a->bias + block * 64 : 0, a->out + block * 64, a->rows, a->n,
                       a->k / 2, 64, 0, 0, 0};
    const int is_tiled = takes_tiles(&product);
    bf16 *panel = a->rows > (is_tiled ? INT4_ROWS : INT4_PACKED_ROWS) ? malloc(a->k * 64 * sizeof(bf16)) : 0;
    if (!panel)
        return 0;
    unpack_block(a, block, panel);
    __asm__ volatile("" ::"r"(panel) : "memory"); /* gcc's loads of tiles do not say that they read memory */
    product.w = (const char *)panel;
    if (is_tiled)
        amx_blocks(&product, 0, 1, 0);
    else
        blocks(&product, 0, 1, 0);
    free(panel);
    return 1;
}

static void int4_blocks(const void *data, int64_t first, int64_t last)
{
    const Int4 *a = data;
    for (int64_t block = first; block < last; block++) {
        if (unpacked_block(a, block))
            continue;
        for (int64_t row = 0; row < a->rows; row += INT4_ROWS)
            if (a->rows - row == 1)
                int4_tile(a, block, row, 1);
            else if (a->rows - row == 2)
                int4_tile(a, block, row, 2);
            else
                int4_tile(a, block, row, INT4_ROWS);
    }
}

/* x: [rows, k]; w: [n / 64, k, 32], each byte of one input of outputs i and i + 32; scales_zeros: [k / group, n, 2];
 * bias: [n] or NULL; out: [rows, n]. group: 32, 64, 128 or 256. */
void int4_linear(const bf16 *x, const uint8_t *w, const bf16 *scales_zeros, const bf16 *bias, bf16 *out, int64_t rows,
                 int64_t n, int64_t k, int64_t group)
{
    Int4 args = {x, bias, w, scales_zeros, out, rows, n, k, group};
    share_in_turns(int4_blocks, &args, n / 64, k * 64);
}

#else

int64_t use_products(int64_t most) { return (void)most, 0; }

#endif
