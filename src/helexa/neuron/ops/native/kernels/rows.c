/* Row operations around the products: normalization, activation, selection of rows, RoPE, and the write to the KV
 * cache. */
#include "graph.h"
#include "lanes.h"

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

KERNEL(group_norm, item) {
    int64_t width = a->width, groups = a->groups;
    const float *x = a->x + item * width, *weight = a->weight + item % groups * width;
    float *out = a->out + item * width;
    if (item < 0) return a->rows * groups;
    lanes squares = {0};
    for (int64_t i = 0; i < width; i += LANES) squares = fused(load(x + i), load(x + i), squares);
    lanes scale = all(1.0f / sqrtf(sum(squares) / (float)width + a->eps));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
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
    ACTIVATE(SILU) ACTIVATE(GELU_TANH) ACTIVATE(GELU) ACTIVATE(RELU2)
    return 0;
}

KERNEL(add_scaled, item) {
    float *x = a->x + item * a->width;
    const float *delta = a->delta + item * a->width;
    lanes factor = all(a->factor);
    if (item < 0) return a->rows;
    for (int64_t i = 0; i < a->width; i += LANES) store(x + i, (load(x + i) + load(delta + i)) * factor);
    return 0;
}

KERNEL(soft_cap, item) {
    int64_t width = a->width;
    float *x = a->x + item * width;
    if (item < 0) return a->rows;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        lanes capped = soft_capped(load(x + i), a->cap);
        store(x + i, a->bias ? capped + load(a->bias + i) : capped);
    }
    for (; i < width; i++) {
        float capped = soft_capped(all(x[i]), a->cap)[0];
        x[i] = a->bias ? capped + a->bias[i] : capped;
    }
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

KERNEL(gate_inputs, item) {
    const float *x = a->x + item * a->width, *inputs = a->inputs + item * a->stride + a->first;
    float *out = a->out + item * a->width;
    int gate = (int)a->gate;
    if (item < 0) return a->rows;
    for (int64_t i = 0; i < a->width; i += LANES) store(out + i, gated(load(x + i), gate) * load(inputs + i));
    return 0;
}

KERNEL(choose_rows, item) {
    if (item < 0) return a->rows;
    memcpy(a->out + item * a->width, a->x + a->chosen[item] * a->width, a->width * sizeof *a->x);
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

/* Return the factor that scales a head of `dim` numbers to a mean square of 1. */
static lanes inverse_rms(const float *from, int64_t dim, float eps) {
    lanes squares = {0};
    for (int64_t i = 0; i < dim; i += LANES) squares = fused(load(from + i), load(from + i), squares);
    return all(1.0f / sqrtf(sum(squares) / (float)dim + eps));
}

/* to = from / rms(from) * weight, for `width` numbers. */
static void normalize(const float *from, const float *weight, float eps, int64_t width, float *to) {
    lanes scale = inverse_rms(from, width, eps);
    for (int64_t i = 0; i < width; i += LANES) store(to + i, load(from + i) * scale * load(weight + i));
}

KERNEL(scale_queries, row) {
    if (row < 0) return a->rows;
    lanes factor = all(1.0f + a->slope * logf((float)(1 + a->positions[row] / a->length)));
    float *x = a->x + row * a->stride;
    for (int64_t i = 0; i < a->width; i += LANES) store(x + i, load(x + i) * factor);
    return 0;
}

KERNEL(norm_columns, row) {
    if (row < 0) return a->rows;
    float *first = a->x + row * a->stride, *second = first + a->first_width;
    normalize(first, a->first, a->eps, a->first_width, first);
    normalize(second, a->second, a->eps, a->second_width, second);
    return 0;
}

/* Prepare one head of `dim` numbers in `to`, float32: normalize if there is a weight, and rotate the first 2 * half
 * numbers. The norm is the last operation if `norm_last` is set. */
static void prepare_head(const float *from, const float *weight, float eps, const float *cosines, const float *sines,
                         int64_t dim, int64_t half, int64_t norm_last, float *to) {
    if (weight && !norm_last)
        normalize(from, weight, eps, dim, to);
    else
        for (int64_t i = 0; i < dim; i += LANES) store(to + i, load(from + i));
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
    if (weight && norm_last) normalize(to, weight, eps, dim, to);
}

/* Return the scale with which the largest number has the 8-bit code 127. The scale is NaN if any number is infinite or
 * NaN: `larger` may ignore these numbers, but they make `nothing` NaN. */
static float scale_of(const float *from, int64_t count) {
    lanes size = {0}, nothing = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        lanes value = load(from + i);
        size = larger(size, (lanes)((bits)value & 0x7fffffff));
        nothing = fused(value, all(0.0f), nothing);
    }
    return largest(size) / 127.0f + sum(nothing);
}

/* Apply the Hadamard transform to blocks of x [dim], with the largest power of two that divides `dim` as block size.
 * The transform spreads a large number over its block, and preserves products of two heads, except for the block size
 * as a factor. LANES numbers before and after x are read and ignored. Returns the block size. */
static int64_t spread(float *x, int64_t dim) {
    const int64_t block = dim & -dim;
#if defined(__AVX512F__)
    for (int64_t i = 0; i < dim; i += LANES) { /* in registers, because loads that span earlier stores are slow */
        __m512 own = _mm512_loadu_ps(x + i), other = _mm512_permute_ps(own, 0xb1);
        own = _mm512_mask_sub_ps(_mm512_add_ps(own, other), 0xaaaa, other, own), other = _mm512_permute_ps(own, 0x4e);
        own = _mm512_mask_sub_ps(_mm512_add_ps(own, other), 0xcccc, other, own);
        other = _mm512_shuffle_f32x4(own, own, 0xb1);
        own = _mm512_mask_sub_ps(_mm512_add_ps(own, other), 0xf0f0, other, own);
        other = _mm512_shuffle_f32x4(own, own, 0x4e);
        _mm512_storeu_ps(x + i, _mm512_mask_sub_ps(_mm512_add_ps(own, other), 0xff00, other, own));
    }
#else
    const words indices = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t step = 1; step < LANES; step *= 2) {
        const words first = (indices & (int32_t)step) == 0;
        for (int64_t i = 0; i < dim; i += LANES) {
            lanes own = load(x + i), before = load(x + i - step), after = load(x + i + step);
            store(x + i, where(first, own + after, before - own));
        }
    }
#endif
    for (int64_t step = LANES; step < block; step *= 2)
        for (int64_t i = 0; i < dim; i += LANES) {
            if (i & step) continue;
            lanes first = load(x + i), second = load(x + i + step);
            store(x + i, first + second), store(x + i + step, first - second);
        }
    return block;
}

/* Smallest scale of a value. Values with a smaller scale become 0, so that the logarithm of the scale is finite. */
#define SMALLEST_SCALE 0x1p-40f

/* Round x [dim] to 8-bit integers and return the scale. */
static float round_head(const float *x, int64_t dim, int8_t *codes) {
    float scale = scale_of(x, dim), inverse = scale > 0 ? 1.0f / scale : 0;
    for (int64_t d = 0; d < dim; d++) codes[d] = (int8_t)lrintf(x[d] * inverse);
    return scale;
}

/* Store the key and the value of the slot `at` of an 8-bit page in `block`. `base` [dim] is the base of the page. */
static void store_bytes_of(uint8_t *block, int64_t at, const float *key, const float *value, const bfloat16 *base,
                           int64_t dim) {
    uint8_t *keys = block, *values = keys + PAGE_SIZE * dim;
    float *scales = (float *)(block + 2 * PAGE_SIZE * dim), difference[MAX_DIM];
    int8_t codes[MAX_DIM];
    for (int64_t i = 0; i < dim; i += LANES) store(difference + i, load(key + i) - load_bfloats(base + i));
    scales[at] = round_head(difference, dim, codes);
    for (int64_t d = 0; d < dim; d++)
        keys[(d / 4 * PAGE_SIZE + at) * 4 + d % 4] = (uint8_t)(codes[d] + 128);
    float scale = round_head(value, dim, codes);
    if (scale < SMALLEST_SCALE) scale = SMALLEST_SCALE, memset(codes, 0, dim);
    scales[PAGE_SIZE + at] = log2f(scale), scales[2 * PAGE_SIZE + at] = 1.0f / scale;
    for (int64_t d = 0; d < dim; d++) values[(at / 4 * dim + d) * 4 + at % 4] = (uint8_t)codes[d];
}

/* Round the first key of a page to the page's base. */
static void round_base(const float *key, int64_t dim, bfloat16 *base) {
    const float off = scale_of(key, dim);
    for (int64_t i = 0; i < dim; i += LANES) store_rounded(base + i, off == off ? load(key + i) : (lanes){0});
}

KERNEL(rotate_store, item) {
    int64_t heads = a->heads, kv_heads = a->kv_heads, width = a->width, dim = a->dim, half = a->half;
    if (item < 0) return a->rows;
    const float *from = a->qkv + item * width * dim;
    const float *c = a->cosines + item * half, *s = a->sines + item * half;
    float numbers[MAX_DIM + 2 * LANES] = {0}, *head = numbers + LANES;
    for (int64_t h = 0; h < heads; h++) {
        prepare_head(from + h * dim, a->query_norm, a->eps, c, s, dim, half, a->norm_last, head);
        int64_t at = (item * heads + h) * dim;
        if (a->narrow) {
            lanes factor = all(1.0f / (float)spread(head, dim));
            for (int64_t i = 0; i < dim; i += LANES) store((float *)a->queries + at + i, load(head + i) * factor);
        } else
            for (int64_t i = 0; i < dim; i += LANES) store_rounded((bfloat16 *)a->queries + at + i, load(head + i));
    }
    int64_t page = a->slots[item] / PAGE_SIZE, at = a->slots[item] % PAGE_SIZE;
    int64_t bytes = a->narrow ? 2 * PAGE_SIZE * dim + 3 * PAGE_SIZE * 4 + 2 * dim : (a->keys_only ? 2 : 4) * PAGE_SIZE * dim;
    if (width == heads) return 0;
    const int64_t first_value = width == heads + kv_heads ? heads : heads + kv_heads;
    for (int64_t h = 0; h < kv_heads; h++) {
        uint8_t *block = a->cache + (page * kv_heads + h) * bytes;
        const float *value = from + (first_value + h) * dim;
        float normed[MAX_DIM];
        if (a->norm_values) {
            const lanes scale = inverse_rms(value, dim, a->eps);
            for (int64_t i = 0; i < dim; i += LANES) store(normed + i, load(value + i) * scale);
            value = normed;
        }
        if (a->narrow) {
            /* Another thread may write the base at the same time, so a row of the same batch recomputes it. */
            bfloat16 *stored = (bfloat16 *)(block + bytes - 2 * dim), computed[MAX_DIM];
            const int64_t first = item - at, here = first >= 0 && a->slots[first] == page * PAGE_SIZE;
            if (here) {
                prepare_head(a->qkv + (first * width + heads + h) * dim, a->key_norm, a->eps,
                             a->cosines + first * half, a->sines + first * half, dim, half, a->norm_last, head);
                spread(head, dim);
                round_base(head, dim, computed);
            }
            if (at == 0) memcpy(stored, computed, dim * sizeof *stored);
            prepare_head(from + (heads + h) * dim, a->key_norm, a->eps, c, s, dim, half, a->norm_last, head);
            spread(head, dim);
            store_bytes_of(block, at, head, value, here ? computed : stored, dim);
            continue;
        }
        prepare_head(from + (heads + h) * dim, a->key_norm, a->eps, c, s, dim, half, a->norm_last, head);
        bfloat16 *keys = (bfloat16 *)block, *values = keys + PAGE_SIZE * dim;
        bfloat16 key_bits[MAX_DIM], value_bits[MAX_DIM];
        for (int64_t i = 0; i < dim; i += LANES) {
            store_rounded(key_bits + i, load(head + i));
            store_rounded(value_bits + i, load(value + i));
        }
        for (int64_t d = 0; d < dim; d += 2) memcpy(keys + (d / 2 * PAGE_SIZE + at) * 2, key_bits + d, 4);
        if (a->keys_only) continue;
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
    int64_t heads = a->heads, dim = a->dim, stride = a->first + dim;
    if (item < 0) return a->rows;
    float *x = a->x + item * heads * dim;
    const float *gate = a->gated + item * heads * stride + a->first;
    for (int64_t h = 0; h < heads; h++, x += dim, gate += stride)
        for (int64_t i = 0; i < dim; i += LANES) store(x + i, load(x + i) * sigmoid(load(gate + i)));
    return 0;
}
