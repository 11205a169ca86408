/* Gated DeltaNet between its convolution and its output projection: the gated delta rule, and the norm with the output
 * gate. `ops/gated_delta.py` describes the rule. Every kernel computes the tokens of a sequence one after another with
 * the same operations, so the results do not depend on the division of a prompt into steps. */
#include "slices.h"
#include "graph.h"

#define BLOCK (2 * LANES)  /* columns of a state per item of the delta rule */

/* Return 1 / the length of x. */
static float inverse_length(const float *x, int64_t dim) {
    lanes squares = {0};
    for (int64_t i = 0; i < dim; i += LANES) squares = fused(load(x + i), load(x + i), squares);
    return 1.0f / sqrtf(sum(squares) + 1e-6f);
}

KERNEL(delta_factors, item) {
    int64_t heads = a->heads, key_heads = a->key_heads, dim = a->key_dim;
    if (item < 0) return a->rows;
    const float *qkv = a->qkv + item * a->width;
    const float *decay = a->decay + item * a->stride, *beta = a->beta + item * a->stride;
    float *out = a->factors + item * 2 * (heads + key_heads);
    for (int64_t h = 0; h < heads; h++) {
        float z = decay[h] + a->bias[h];
        out[h] = expf(-a->rate[h] * (fmaxf(z, 0) + log1pf(expf(-fabsf(z))))); /* softplus(z), without overflow */
        out[heads + h] = 1.0f / (1.0f + expf(-beta[h]));
    }
    out += 2 * heads;
    for (int64_t h = 0; h < key_heads; h++) {
        out[h] = inverse_length(qkv + h * dim, dim) / sqrtf((float)dim);
        out[key_heads + h] = inverse_length(qkv + (key_heads + h) * dim, dim);
    }
    return 0;
}

/* Compute `count` slices of adjacent columns of a head's state, for all tokens of a span. */
INLINE void advance(const delta_rule_arguments *a, const span *s, int64_t head, int64_t column, const int count) {
    int64_t heads = a->heads, key_heads = a->key_heads, dim = a->key_dim, value_dim = a->value_dim;
    int64_t key_head = head / (heads / key_heads), keys = key_heads * dim, width = 2 * keys + heads * value_dim;
    float *saved = a->state + ((s->slot * heads + head) * dim) * value_dim + column;
    const float *q = a->qkv + s->row * width + key_head * dim, *k = q + keys;
    const float *v = a->qkv + s->row * width + 2 * keys + head * value_dim + column;
    const float *factors = a->factors + s->row * 2 * (heads + key_heads);
    float *out = a->out + (s->row * heads + head) * value_dim + column;
    slice state[MAX_DIM][BLOCK / SLICE];
    slice stored[BLOCK / SLICE] = {0}; /* the product of the state and the next token's key */
    for (int64_t i = 0; i < dim; i++)
        for (int c = 0; c < count; c++) {
            state[i][c] = s->initial ? fill(0) : (slice)slice_load(saved + i * value_dim + c * SLICE);
            stored[c] = slice_fused(fill(k[i]), state[i][c], stored[c]);
        }
    for (int64_t t = 0; t < s->rows; t++) {
        float decay = factors[head], beta = factors[heads + head];
        float q_factor = factors[2 * heads + key_head], k_factor = factors[2 * heads + key_heads + key_head];
        const float *next = t + 1 < s->rows ? k + width : k;
        slice change[BLOCK / SLICE], result[BLOCK / SLICE] = {0}, read[BLOCK / SLICE] = {0};
        for (int c = 0; c < count; c++)
            change[c] = ((slice)slice_load(v + c * SLICE) - stored[c] * (decay * k_factor)) * (beta * k_factor);
        for (int64_t i = 0; i < dim; i++)
            for (int c = 0; c < count; c++) {
                slice value = slice_fused(fill(k[i]), change[c], state[i][c] * decay);
                state[i][c] = value;
                result[c] = slice_fused(fill(q[i]), value, result[c]);
                read[c] = slice_fused(fill(next[i]), value, read[c]);
            }
        for (int c = 0; c < count; c++) {
            slice_store(out + c * SLICE, result[c] * q_factor);
            stored[c] = read[c];
        }
        if (t + 1 == s->settled)
            for (int64_t i = 0; i < dim; i++)
                for (int c = 0; c < count; c++) slice_store(saved + i * value_dim + c * SLICE, state[i][c]);
        q += width, k += width, v += width, factors += 2 * (heads + key_heads), out += heads * value_dim;
    }
}

KERNEL(delta_rule, item) {
    int64_t blocks = (a->value_dim + BLOCK - 1) / BLOCK;
    if (item < 0) return *a->span_count * a->heads * blocks;
    int64_t head = item / blocks % a->heads, column = item % blocks * BLOCK;
    const span *s = a->spans + item / blocks / a->heads;
    if (column + BLOCK <= a->value_dim) advance(a, s, head, column, BLOCK / SLICE);
    else advance(a, s, head, column, LANES / SLICE);
    return 0;
}

KERNEL(gated_norm, item) {
    int64_t heads = a->heads, dim = a->dim, row = a->chosen ? a->chosen[item < 0 ? 0 : item] : item;
    if (item < 0) return a->rows;
    const float *x = a->x + row * heads * dim, *z = a->z + row * a->stride;
    float *out = a->out + item * heads * dim;
    for (int64_t h = 0; h < heads; h++, x += dim, z += dim, out += dim) {
        lanes squares = {0};
        for (int64_t i = 0; i < dim; i += LANES) squares = fused(load(x + i), load(x + i), squares);
        lanes scale = all(1.0f / sqrtf(sum(squares) / (float)dim + a->eps));
        for (int64_t i = 0; i < dim; i += LANES)
            store(out + i, load(x + i) * scale * load(a->weight + i) * gated(load(z + i), SILU));
    }
    return 0;
}
