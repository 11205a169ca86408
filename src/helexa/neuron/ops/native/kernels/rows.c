/* Row operations around the products: normalization, activation, selection of rows, argmax, RoPE, and the write to the
 * KV cache. */
#include "lanes.h"
#include "graph.h"

KERNEL(add_rms_norm, row) {
    int64_t width = a->width;
    float *x = a->x + row * width, *out = a->out + row * width;
    if (row < 0) return a->rows;
    lanes squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        lanes value = load(x + i);
        if (a->delta) store(x + i, value = value + load(a->delta + row * width + i));
        squares = fused(value, value, squares);
    }
    lanes scale = all(1.0f / sqrtf(sum(squares) / (float)width + a->eps));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(x + i) * scale * load(a->weight + i));
    return 0;
}

KERNEL(add_layer_norm, row) {
    int64_t width = a->width;
    float *x = a->x + row * width, *out = a->out + row * width;
    if (row < 0) return a->rows;
    lanes sums = {0}, squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        lanes value = load(x + i);
        if (a->delta) store(x + i, value = value + load(a->delta + row * width + i));
        sums += value;
    }
    lanes mean = all(sum(sums) / (float)width);
    for (int64_t i = 0; i < width; i += LANES) {
        lanes value = load(x + i) - mean;
        squares = fused(value, value, squares);
    }
    lanes scale = all(1.0f / sqrtf(sum(squares) / (float)width + a->eps));
    for (int64_t i = 0; i < width; i += LANES)
        store(out + i, fused((load(x + i) - mean) * scale, load(a->weight + i), load(a->bias + i)));
    return 0;
}

KERNEL(activate, item) {
    int64_t width = a->width;
    float *x = a->x + item * width;
    if (item < 0) return a->rows;
#define ACTIVATE(NAME) \
    if (a->activation == NAME) \
        for (int64_t i = 0; i < width; i += LANES) store(x + i, activated(load(x + i), NAME));
    ACTIVATE(SILU) ACTIVATE(GELU_TANH) ACTIVATE(GELU)
    return 0;
}

KERNEL(gate_mul, item) {
    int64_t width = a->width;
    const float *x = a->x + item * 2 * width;
    float *out = a->out + item * width;
    int gate = (int)a->gate;
    if (item < 0) return a->rows;
    for (int64_t i = 0; i < width; i += LANES) store(out + i, gated(load(x + i), gate) * load(x + width + i));
    return 0;
}

KERNEL(choose_rows, item) {
    if (item < 0) return a->rows;
    memcpy(a->out + item * a->width, a->x + a->chosen[item] * a->width, a->width * sizeof *a->x);
    return 0;
}

/* A scalar loop compares the last `width % 16` numbers. */
KERNEL(argmax, item) {
    int64_t width = a->width, i = 0;
    const float *x = a->x + item * width;
    if (item < 0) return a->rows;
    lanes most = all(-INFINITY);
    words index = {0}, at = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (; i + LANES <= width; i += LANES, at += LANES) {
        lanes value = load(x + i);
        words above = value > most;
        most = where(above, value, most);
        index = (at & above) | (index & ~above);
    }
    int64_t column = index[0];
    float peak = most[0];
    for (int lane = 1; lane < LANES; lane++)
        if (most[lane] > peak || (most[lane] == peak && index[lane] < column)) peak = most[lane], column = index[lane];
    for (; i < width; i++)
        if (x[i] > peak) peak = x[i], column = i;
    a->out[item] = isfinite(peak) ? column : NON_FINITE;
    return 0;
}

KERNEL(rope_tables, item) {
    if (item < 0) return a->rows;
    float *cosines = a->cosines + item * a->half, *sines = a->sines + item * a->half;
    for (int64_t i = 0; i < a->half; i++) {
        float angle = (float)a->positions[item] * a->frequencies[i];
        cosines[i] = cosf(angle) * a->factor, sines[i] = sinf(angle) * a->factor;
    }
    return 0;
}

/* Prepare one head of `dim` numbers in `to`, float32: normalize if there is a weight, then rotate the first 2 * half
 * numbers. */
static void prepare_head(const float *from, const float *weight, float eps, const float *cosines, const float *sines,
                         int64_t dim, int64_t half, float *to) {
    lanes squares = {0};
    if (weight)
        for (int64_t i = 0; i < dim; i += LANES) squares = fused(load(from + i), load(from + i), squares);
    lanes scale = all(1.0f / sqrtf(sum(squares) / (float)dim + eps));
    for (int64_t i = 0; i < dim; i += LANES)
        store(to + i, weight ? load(from + i) * scale * load(weight + i) : load(from + i));
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        lanes x = load(to + i), y = load(to + half + i), c = load(cosines + i), s = load(sines + i);
        store(to + i, fused(x, c, -(y * s)));
        store(to + half + i, fused(y, c, x * s));
    }
    for (; i < half; i++) {
        float x = to[i], y = to[half + i];
        to[i] = x * cosines[i] - y * sines[i], to[half + i] = y * cosines[i] + x * sines[i];
    }
}

/* Return the scale with which the largest number has the 8-bit code 127. The scale is NaN if any number is infinite or
 * NaN. `nothing` detects these numbers, because `larger` may ignore NaN. */
static float scale_of(const float *from, int64_t count) {
    lanes size = {0}, nothing = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        lanes value = load(from + i);
        size = larger(size, (lanes)((bits)value & 0x7fffffff));
        nothing = fused(value, all(0.0f), nothing);
    }
    return largest(size) / 127.0f + sum(nothing);
}

KERNEL(rotate_store, item) {
    int64_t heads = a->heads, kv_heads = a->kv_heads, dim = a->dim, half = a->half;
    if (item < 0) return a->rows;
    const float *from = a->qkv + item * (heads + 2 * kv_heads) * dim;
    const float *c = a->cosines + item * half, *s = a->sines + item * half;
    bfloat16 *queries = a->queries + item * heads * dim;
    float head[dim];
    for (int64_t h = 0; h < heads; h++) {
        prepare_head(from + h * dim, a->query_norm, a->eps, c, s, dim, half, head);
        for (int64_t i = 0; i < dim; i += LANES) store_rounded(queries + h * dim + i, load(head + i));
    }
    int64_t page = a->slots[item] / PAGE_SIZE, at = a->slots[item] % PAGE_SIZE;
    int64_t bytes = a->narrow ? 2 * PAGE_SIZE * dim + 2 * PAGE_SIZE * 4 : 4 * PAGE_SIZE * dim;
    for (int64_t h = 0; h < kv_heads; h++) {
        uint8_t *block = a->cache + (page * kv_heads + h) * bytes;
        const float *value = from + (heads + kv_heads + h) * dim;
        prepare_head(from + (heads + h) * dim, a->key_norm, a->eps, c, s, dim, half, head);
        if (a->narrow) {
            int8_t *keys = (int8_t *)block, *values = keys + PAGE_SIZE * dim;
            float *scales = (float *)(block + 2 * PAGE_SIZE * dim);
            float key_scale = scale_of(head, dim), value_scale = scale_of(value, dim);
            float key_inverse = key_scale > 0 ? 1.0f / key_scale : 0;
            float value_inverse = value_scale > 0 ? 1.0f / value_scale : 0;
            scales[at] = key_scale, scales[PAGE_SIZE + at] = value_scale;
            for (int64_t d = 0; d < dim; d++) {
                keys[(d / 2 * PAGE_SIZE + at) * 2 + d % 2] = (int8_t)lrintf(head[d] * key_inverse);
                values[at / 2 * 2 * dim + d * 2 + at % 2] = (int8_t)lrintf(value[d] * value_inverse);
            }
            continue;
        }
        bfloat16 *keys = (bfloat16 *)block, *values = keys + PAGE_SIZE * dim;
        bfloat16 key_bits[dim], value_bits[dim];
        for (int64_t i = 0; i < dim; i += LANES) {
            store_rounded(key_bits + i, load(head + i));
            store_rounded(value_bits + i, load(value + i));
        }
        for (int64_t d = 0; d < dim; d += 2) memcpy(keys + (d / 2 * PAGE_SIZE + at) * 2, key_bits + d, 4);
        for (int64_t d = 0; d < dim; d++) values[at / 2 * 2 * dim + d * 2 + at % 2] = value_bits[d];
    }
    return 0;
}

KERNEL(join_queries, item) {
    int64_t heads = a->heads, others = 2 * a->kv_heads * a->dim, bytes = a->dim * (int64_t)sizeof(float);
    if (item < 0) return a->rows;
    const float *gated = a->gated + item * heads * 2 * a->dim;
    float *qkv = a->qkv + item * (heads * a->dim + others);
    for (int64_t h = 0; h < heads; h++) memcpy(qkv + h * a->dim, gated + 2 * h * a->dim, bytes);
    memcpy(qkv + heads * a->dim, a->kv + item * others, others * sizeof *qkv);
    return 0;
}

KERNEL(gate_heads, item) {
    int64_t heads = a->heads, dim = a->dim;
    if (item < 0) return a->rows;
    float *x = a->x + item * heads * dim;
    const float *gate = a->gated + item * heads * 2 * dim + dim;
    for (int64_t h = 0; h < heads; h++, x += dim, gate += 2 * dim)
        for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) * sigmoid(load(gate + i)));
    return 0;
}
