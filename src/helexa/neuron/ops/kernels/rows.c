/* What surrounds the products, one row at a time: normalisation, activation, rotation, and the plain-weight product's
 * rounding. */
#include "lanes.h"
#include "tape.h"

#define PAGE 64

/* x [rows, width] += delta (may be null); out = x / rms(x) * weight. */
int64_t add_rms_norm(const int64_t *a, int64_t row) {
    const float *delta = (const float *)a[1], *weight = (const float *)a[2];
    int64_t rows = a[4], width = a[5];
    float *x = (float *)a[0] + row * width, *out = (float *)a[3] + row * width, eps;
    memcpy(&eps, a + 6, sizeof eps);
    if (row < 0) return rows;
    lanes squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        lanes value = load(x + i);
        if (delta) store(x + i, value = value + load(delta + row * width + i));
        squares = fused(value, value, squares);
    }
    lanes scale = all(1.0f / sqrtf(sum(squares) / (float)width + eps));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
    return 0;
}

/* out [rows, width] = gate(first half) * second half of x [rows, 2 * width]. */
int64_t gate_mul(const int64_t *a, int64_t item) {
    const float *x = (const float *)a[0] + item * 2 * a[3];
    float *out = (float *)a[1] + item * a[3];
    int64_t rows = a[2], width = a[3];
    int gate = (int)a[4];
    if (item < 0) return rows;
    for (int64_t i = 0; i < width; i += LANES) store(out + i, gated(load(x + i), gate) * load(x + width + i));
    return 0;
}

/* Rows `chosen` int32 [rows] of x [.., width] -> out [rows, width]. */
int64_t choose_rows(const int64_t *a, int64_t item) {
    const float *x = (const float *)a[0];
    const int32_t *chosen = (const int32_t *)a[1];
    int64_t rows = a[3], width = a[4];
    if (item < 0) return rows;
    memcpy((float *)a[2] + item * width, x + chosen[item] * width, width * sizeof *x);
    return 0;
}

/* out [rows] = where the largest of x [rows, width] is, the first of equals; the last `width % 16` are compared one by
 * one. */
int64_t argmax(const int64_t *a, int64_t item) {
    const float *x = (const float *)a[0] + item * a[3];
    int64_t *out = (int64_t *)a[1];
    int64_t rows = a[2], width = a[3], i = 0;
    if (item < 0) return rows;
    lanes most = all(-INFINITY);
    words index = {0}, at = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (; i + LANES <= width; i += LANES, at += LANES) {
        lanes value = load(x + i);
        words above = value > most;
        most = where(above, value, most);
        index = (at & above) | (index & ~above);
    }
    int64_t found = index[0];
    float peak = most[0];
    for (int lane = 1; lane < LANES; lane++)
        if (most[lane] > peak || (most[lane] == peak && index[lane] < found)) peak = most[lane], found = index[lane];
    for (; i < width; i++)
        if (x[i] > peak) peak = x[i], found = i;
    out[item] = found;
    return 0;
}

/* cos and sin [rows, half] of positions int32 [rows] times frequencies, both times a factor. */
int64_t rope_tables(const int64_t *a, int64_t item) {
    const int32_t *positions = (const int32_t *)a[0];
    const float *frequencies = (const float *)a[1];
    float *cosines = (float *)a[2], *sines = (float *)a[3], factor;
    int64_t rows = a[4], half = a[5];
    memcpy(&factor, a + 6, sizeof factor);
    if (item < 0) return rows;
    for (int64_t i = 0; i < half; i++) {
        float angle = (float)positions[item] * frequencies[i];
        cosines[item * half + i] = cosf(angle) * factor, sines[item * half + i] = sinf(angle) * factor;
    }
    return 0;
}

/* One head of `dim` numbers: normalised if there is a weight, then its first 2 * half rotated; in `to`, float32. */
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

/* 8 bits and a scale, where the largest number becomes 127. A scale is NaN if any number is infinite or NaN, which
 * `larger` may lose. */
static float scale_of(const float *from, int64_t count) {
    lanes size = {0}, nothing = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        lanes value = load(from + i);
        size = larger(size, (lanes)((bits)value & 0x7fffffff));
        nothing = fused(value, all(0.0f), nothing);
    }
    return largest(size) / 127.0f + sum(nothing);
}

/* Heads of qkv [rows, heads + 2 * kv_heads, dim]: queries normalised, rotated by cos and sin [rows, half], rounded to
 * `queries` bfloat16 [rows, heads, dim]; keys the same into the cache; values into the cache as they are; both to
 * `slots` int32 [rows]. The cache is [pages, kv_heads] of
 *   bfloat16: keys [dim / 2, PAGE, 2], values [PAGE / 2, dim, 2]
 *   8 bits:   keys [dim / 2, PAGE, 2], values [PAGE / 2, dim, 2], key scales float32 [PAGE], value scales [PAGE] */
int64_t rotate_store(const int64_t *a, int64_t item) {
    const float *qkv = (const float *)a[0], *cosines = (const float *)a[1], *sines = (const float *)a[2];
    const int32_t *slots = (const int32_t *)a[5];
    const float *query_norm = (const float *)a[6], *key_norm = (const float *)a[7];
    int64_t rows = a[8], heads = a[9], kv_heads = a[10], dim = a[11], half = a[12], narrow = a[13];
    float eps;
    memcpy(&eps, a + 14, sizeof eps);
    if (item < 0) return rows;
    const float *from = qkv + item * (heads + 2 * kv_heads) * dim;
    const float *c = cosines + item * half, *s = sines + item * half;
    uint16_t *queries = (uint16_t *)a[3] + item * heads * dim;
    float head[dim];
    for (int64_t h = 0; h < heads; h++) {
        prepare_head(from + h * dim, query_norm, eps, c, s, dim, half, head);
        for (int64_t i = 0; i < dim; i += LANES) store_rounded(queries + h * dim + i, load(head + i));
    }
    int64_t page = slots[item] / PAGE, at = slots[item] % PAGE;
    int64_t bytes = narrow ? 2 * PAGE * dim + 2 * PAGE * 4 : 4 * PAGE * dim;
    for (int64_t h = 0; h < kv_heads; h++) {
        uint8_t *block = (uint8_t *)a[4] + (page * kv_heads + h) * bytes;
        const float *value = from + (heads + kv_heads + h) * dim;
        prepare_head(from + (heads + h) * dim, key_norm, eps, c, s, dim, half, head);
        if (narrow) {
            int8_t *keys = (int8_t *)block, *values = keys + PAGE * dim;
            float *scales = (float *)(block + 2 * PAGE * dim);
            float key_scale = scale_of(head, dim), value_scale = scale_of(value, dim);
            float key_inverse = key_scale > 0 ? 1.0f / key_scale : 0;
            float value_inverse = value_scale > 0 ? 1.0f / value_scale : 0;
            scales[at] = key_scale, scales[PAGE + at] = value_scale;
            for (int64_t d = 0; d < dim; d++) {
                keys[(d / 2 * PAGE + at) * 2 + d % 2] = (int8_t)lrintf(head[d] * key_inverse);
                values[at / 2 * 2 * dim + d * 2 + at % 2] = (int8_t)lrintf(value[d] * value_inverse);
            }
            continue;
        }
        uint16_t *keys = (uint16_t *)block, *values = keys + PAGE * dim;
        uint16_t key_bits[dim], value_bits[dim];
        for (int64_t i = 0; i < dim; i += LANES) {
            store_rounded(key_bits + i, load(head + i));
            store_rounded(value_bits + i, load(value + i));
        }
        for (int64_t d = 0; d < dim; d += 2) memcpy(keys + (d / 2 * PAGE + at) * 2, key_bits + d, 4);
        for (int64_t d = 0; d < dim; d++) values[at / 2 * 2 * dim + d * 2 + at % 2] = value_bits[d];
    }
    return 0;
}
