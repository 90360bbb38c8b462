/* Numbers of 16 bits, and the threads on which the functions of this folder run. */

#ifndef QUIRE_THREADS_H
#define QUIRE_THREADS_H

#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

/* A part of the work: items first to last of what args describes. */
typedef void (*Range)(const void *args, int64_t first, int64_t last);

/* Run n items, of `each` numbers each, in equal shares: on one thread if there are too few to wake another. */
__attribute__((visibility("hidden"))) void share(Range run, const void *args, int64_t n, int64_t each);

/* The same, but a thread takes the next item when it is done with one: a core that other programs use takes fewer. */
__attribute__((visibility("hidden"))) void share_in_turns(Range run, const void *args, int64_t n, int64_t each);

/* rows.c */
void quantize_rows(const bf16 *x, uint8_t *values, float *scales, int64_t rows, int64_t dim, float least);

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

#endif
