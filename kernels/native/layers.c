/* The decoder layers of a step in which each row has one token, in one call: between the functions of rows.c and
 * products.c nothing waits for Python. ops.py declares the structures, models/layers/layer_loop.py fills them.
 */

#include "threads.h"

#if HAS_PRODUCTS

typedef struct {
    int64_t kind; /* see below */
    const void *w;
    const bf16 *bias; /* [n], or NULL */
    const void *scales; /* of bytes [n] fp32; of 4 bits [k / width, n, 2], with zeros */
    const int32_t *sums; /* of bytes */
    int64_t n, k, width; /* width: outputs of a block; of 4 bits inputs of a group */
} Matrix;

enum { BF16, BYTES, INT4 };

typedef struct {
    Matrix qkv, output, gate_up, down;
    const bf16 *attention_norm, *mlp_norm, *q_norm, *k_norm; /* the last two may be NULL */
    const void *turns;
    bf16 *k_cache, *v_cache;
    int64_t heads, kv_heads, dim, block_size, k_block, k_slot, v_block, v_slot, wide_turns, window, chunk, table;
    float attention_eps, mlp_eps, head_eps, scale;
} Layer;

typedef struct {
    const int64_t *slots;
    const int32_t *lengths, *blocks;
    int64_t width; /* of blocks: [rows, width] */
} Table;

typedef struct {
    int64_t rows, hidden, layers, longest; /* longest: a bound of the tables' lengths */
    float least;                           /* of the scales of rounded rows */
} Step;

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static void multiply(const Matrix *m, const Step *step, const bf16 *x, bf16 *out, char *scratch)
{
    if (m->kind == BF16)
        bf16_linear(x, m->w, m->bias, out, step->rows, m->n, m->k, m->width);
    else if (m->kind == BYTES)
        rounded_int8_linear(x, m->w, m->bias, out, (uint8_t *)scratch + 4 * step->rows, (float *)scratch, m->scales,
                            m->sums, step->rows, m->n, m->k, m->width, step->least);
    else
        int4_linear(x, m->w, m->scales, m->bias, out, step->rows, m->n, m->k, m->width);
}

/* Numbers of a row of scratch: the wide ones of a layer, one behind the other, and the rounded inputs of a product. */
static int64_t row_numbers(const Layer *layers, int64_t num_layers, int64_t hidden, int64_t *wide)
{
    int64_t inputs = hidden;
    *wide = 0;
    for (int64_t i = 0; i < num_layers; i++) {
        const Layer *a = layers + i;
        *wide = most(*wide, most(a->qkv.n + 2 * a->heads * a->dim, a->gate_up.n + a->down.k));
        inputs = most(inputs, most(a->down.k, a->output.k));
    }
    return 2 * hidden + *wide + inputs / 2 + 4;
}

/* Return the bytes of scratch that a step of `rows` needs. */
int64_t layers_scratch(const Layer *layers, int64_t num_layers, int64_t rows, int64_t hidden)
{
    int64_t wide;
    return rows * row_numbers(layers, num_layers, hidden, &wide) * (int64_t)sizeof(bf16);
}

/* hidden: [rows, hidden], the embedded tokens, then what the last layer adds to residual: [rows, hidden], which is only
 * written. positions: [rows]. tables: by Layer.table. */
void run_layers(const Layer *layers, const Table *tables, const Step *step, const int64_t *positions, bf16 *hidden,
                bf16 *residual, bf16 *scratch)
{
    int64_t rows = step->rows, wide, size = rows * step->hidden;
    row_numbers(layers, step->layers, step->hidden, &wide);
    bf16 *normed = scratch, *sum = normed + size, *first = sum + size;
    char *rounded = (char *)(first + rows * wide);
    /* the residual stream is read from one of two buffers and written to the other: twice a layer */
    memcpy(residual, hidden, size * sizeof(bf16));
    for (int64_t i = 0; i < step->layers; i++) {
        const Layer *a = layers + i;
        const Table *table = tables + a->table;
        bf16 *q = first + rows * a->qkv.n, *attended = q + rows * a->heads * a->dim;
        bf16 *gated = first + rows * a->gate_up.n;
        if (i)
            rms_norm(hidden, residual, a->attention_norm, normed, sum, rows, step->hidden, a->attention_eps);
        else
            rms_norm(hidden, 0, a->attention_norm, normed, 0, rows, step->hidden, a->attention_eps);
        multiply(&a->qkv, step, normed, first, rounded);
        norm_rope_write_kv(first, a->q_norm, a->k_norm, positions, table->slots, a->turns, q, a->k_cache, a->v_cache,
                           rows, a->heads, a->kv_heads, a->dim, a->block_size, a->k_block, a->k_slot, a->v_block,
                           a->v_slot, a->wide_turns, a->head_eps);
        attend(q, a->k_cache, a->v_cache, attended, table->lengths, table->blocks, rows, a->heads, a->kv_heads, a->dim,
               a->dim, table->width, a->block_size, a->k_block, a->k_slot, a->v_block, a->v_slot, a->window, a->chunk,
               step->longest, a->scale);
        multiply(&a->output, step, attended, hidden, rounded);
        rms_norm(hidden, i ? sum : residual, a->mlp_norm, normed, i ? residual : sum, rows, step->hidden, a->mlp_eps);
        if (!i)
            memcpy(residual, sum, size * sizeof(bf16));
        multiply(&a->gate_up, step, normed, first, rounded);
        silu_and_mul(first, gated, rows, a->down.k);
        multiply(&a->down, step, gated, hidden, rounded);
    }
}

#endif
