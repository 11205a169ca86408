/* The scan of Mamba-2 between its convolution and its norm. `ops/state_space.py` describes the scan. The kernel
 * computes the tokens of a sequence one after another with the same operations, so the results do not depend on the
 * division of a prompt into steps. */
#include "slices.h"
#include "graph.h"

#define BLOCK (2 * LANES) /* columns of a state per item */

KERNEL(scan_factors, item) {
    int64_t heads = a->heads;
    if (item < 0) return a->rows;
    const float *steps = a->steps + item * a->stride;
    float *out = a->factors + item * 2 * heads;
    for (int64_t h = 0; h < heads; h++) {
        float z = steps[h] + a->bias[h];
        out[h] = fmaxf(z, 0) + log1pf(expf(-fabsf(z))); /* softplus(z), without overflow */
        out[heads + h] = expf(-a->rate[h] * out[h]);
    }
    return 0;
}

/* Compute `count` slices of adjacent columns of a head's state, for all tokens of a span. */
INLINE void advance(const scan_arguments *a, const span *s, int64_t head, int64_t column, const int count) {
    int64_t heads = a->heads, groups = a->groups, dim = a->state_dim, value_dim = a->head_dim;
    int64_t values = heads * value_dim, keys = groups * dim, width = values + 2 * keys;
    float *saved = a->state + ((s->slot * heads + head) * dim) * value_dim + column;
    const float *x = a->mixed + s->row * width + head * value_dim + column;
    const float *key = a->mixed + s->row * width + values + head / (heads / groups) * dim, *query = key + keys;
    const float *factors = a->factors + s->row * 2 * heads;
    const float *z = a->z + s->row * a->stride + head * value_dim + column;
    float *out = a->out + (s->row * heads + head) * value_dim + column;
    slice state[MAX_DIM][BLOCK / SLICE], skip = fill(a->skip[head]);
    for (int64_t i = 0; i < dim; i++)
        for (int c = 0; c < count; c++)
            state[i][c] = s->initial ? fill(0) : (slice)slice_load(saved + i * value_dim + c * SLICE);
    for (int64_t t = 0; t < s->rows; t++) {
        float step = factors[head], decay = factors[heads + head];
        slice input[BLOCK / SLICE], result[BLOCK / SLICE];
        for (int c = 0; c < count; c++) {
            slice value = (slice)slice_load(x + c * SLICE);
            input[c] = value * step;
            result[c] = value * skip;
        }
        for (int64_t i = 0; i < dim; i++)
            for (int c = 0; c < count; c++) {
                slice value = slice_fused(fill(key[i]), input[c], state[i][c] * decay);
                state[i][c] = value;
                result[c] = slice_fused(fill(query[i]), value, result[c]);
            }
        for (int c = 0; c < count; c++)
            slice_store(out + c * SLICE, result[c] * slice_gated((slice)slice_load(z + c * SLICE), SILU));
        if (t + 1 == s->settled)
            for (int64_t i = 0; i < dim; i++)
                for (int c = 0; c < count; c++) slice_store(saved + i * value_dim + c * SLICE, state[i][c]);
        x += width, key += width, query += width, factors += 2 * heads, z += a->stride, out += values;
    }
}

KERNEL(scan, item) {
    int64_t blocks = (a->head_dim + BLOCK - 1) / BLOCK;
    if (item < 0) return *a->span_count * a->heads * blocks;
    int64_t head = item / blocks % a->heads, column = item % blocks * BLOCK;
    const span *s = a->spans + item / blocks / a->heads;
    if (column + BLOCK <= a->head_dim) advance(a, s, head, column, BLOCK / SLICE);
    else advance(a, s, head, column, LANES / SLICE);
    return 0;
}
