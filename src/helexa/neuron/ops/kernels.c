/* Small CPU kernels for what surrounds the matrix products of a decode step, where torch's operators cost more in calls
 * and passes than in work. Compiled for the machine at hand by `compiler.py`; each has a twin in `reference.py`.
 *
 * bfloat16 is held as uint16_t. A vector has 16 lanes; the compiler splits it where registers are narrower.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define MAX_DIM 256
#define MAX_PAGE 256
#define SPAN 512              /* positions that one work item of attention covers */
#define PARALLEL_WORK (1 << 18) /* multiply-adds below which waking threads costs more than they save */

typedef float lanes __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef float float8 __attribute__((vector_size(32)));
typedef float float4 __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(32)));
#define INLINE static inline __attribute__((always_inline))

INLINE lanes load(const uint16_t *from) {
    halves bits;
    memcpy(&bits, from, sizeof bits);
    return (lanes)(__builtin_convertvector(bits, words) << 16);
}

INLINE lanes load_float(const float *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Rounds to nearest, ties to even. */
INLINE void store(uint16_t *to, lanes value) {
    words bits = (words)value;
    bits += 0x7fff + ((bits >> 16) & 1);
    halves top = __builtin_convertvector(bits >> 16, halves);
    memcpy(to, &top, sizeof top);
}

INLINE float sum(lanes value) {
    float8 eighths[2];
    memcpy(eighths, &value, sizeof value);
    eighths[0] += eighths[1];
    float4 quarters[2];
    memcpy(quarters, eighths, sizeof quarters);
    quarters[0] += quarters[1];
    return (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
}

/* exp for x <= 0 (larger x up to 88 works too): 2^n * e^r with |r| <= ln(2) / 2 and a polynomial for e^r. */
INLINE lanes exponential(lanes x) {
    lanes least = (lanes){0} - 87.0f;
    words above = (words)(x > least);
    x = (lanes)(((words)x & above) | ((words)least & ~above));
    lanes shifted = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to a whole number */
    lanes whole = shifted - 12582912.0f;
    lanes r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    lanes e = r * 1.9875691e-4f + 1.3981999e-3f;
    e = e * r + 8.3334519e-3f;
    e = e * r + 4.1665795e-2f;
    e = e * r + 1.6666665e-1f;
    e = e * r + 0.5f;
    e = e * r * r + r + 1.0f;
    return e * (lanes)(((words)shifted + (127 - 0x4b400000)) << 23);
}

/* hidden [rows, width] += delta (may be null); out = hidden / rms(hidden) * weight. */
void add_rms_norm(float *hidden, const uint16_t *delta, const float *weight, uint16_t *out, int64_t rows, int64_t width,
                  float eps) {
#pragma omp parallel for if (rows * width > PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++) {
        float *x = hidden + row * width;
        lanes squares = {0};
        for (int64_t i = 0; i < width; i += LANES) {
            lanes value = load_float(x + i);
            if (delta) {
                value += load(delta + row * width + i);
                memcpy(x + i, &value, sizeof value);
            }
            squares += value * value;
        }
        float scale = 1.0f / sqrtf(sum(squares) / (float)width + eps);
        for (int64_t i = 0; i < width; i += LANES)
            store(out + row * width + i, load_float(x + i) * scale * load_float(weight + i));
    }
}

/* out [rows, width] = silu(gate) * up, for gate_up [rows, 2 * width]. */
void silu_mul(const uint16_t *gate_up, uint16_t *out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows * width > PARALLEL_WORK / 8)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            lanes gate = load(gate_up + row * 2 * width + i), up = load(gate_up + row * 2 * width + width + i);
            words negative = (words)(gate < 0.0f);
            lanes small = exponential((lanes)((words)gate | 0x80000000u)); /* e^-|gate| */
            lanes numerator = (lanes)(((words)small & negative) | ((words)((lanes){0} + 1.0f) & ~negative));
            store(out + row * width + i, gate * numerator / (small + 1.0f) * up);
        }
}

/* Rotate the query heads of qkv [rows, heads + 2 * kv_heads, dim] in place; rotate the key heads into the cache
 * [2, kv_heads, slots_total, dim] at `slots` [rows]; copy the value heads there. cos and sin are [rows, dim]. */
void rotate_store(uint16_t *qkv, const float *cosines, const float *sines, uint16_t *cache, const int64_t *slots,
                  int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t slots_total) {
    int64_t all = heads + 2 * kv_heads, half = dim / 2;
#pragma omp parallel for if (rows * all * dim > PARALLEL_WORK)
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cosines + row * dim, *s = sines + row * dim + half;
        for (int64_t head = 0; head < all; head++) {
            uint16_t *from = qkv + (row * all + head) * dim;
            uint16_t *to = head < heads ? from : cache + ((head - heads) * slots_total + slots[row]) * dim;
            if (head >= heads + kv_heads) {
                memcpy(to, from, dim * sizeof *to);
                continue;
            }
            for (int64_t i = 0; i < half; i += LANES) {
                lanes a = load(from + i), b = load(from + half + i), turn = load_float(s + i);
                store(to + i, a * load_float(c + i) - b * turn);
                store(to + half + i, b * load_float(c + half + i) + a * turn);
            }
        }
    }
}

typedef struct {
    float largest, total;
    float values[MAX_DIM];
} partial;

/* Attention of `group` queries of one KV head over positions [from, to): a softmax that is rescaled as it goes. */
INLINE void attend_span(const uint16_t *queries, const uint16_t *keys, const uint16_t *values, const int64_t *pages,
                        int64_t page_size, int64_t from, int64_t to, float scale, const int group, const int dim,
                        partial *out) {
    lanes query[group][dim / LANES], sums[group][dim / LANES];
    float largest[group], total[group], weights[group][MAX_PAGE] __attribute__((aligned(64)));
    for (int g = 0; g < group; g++) {
        largest[g] = -INFINITY, total[g] = 0;
        for (int d = 0; d < dim / LANES; d++) {
            query[g][d] = load(queries + g * dim + d * LANES) * scale;
            sums[g][d] = (lanes){0};
        }
    }
    while (from < to) {
        int64_t offset = from % page_size, first = pages[from / page_size] * page_size + offset;
        int count = (int)(to - from < page_size - offset ? to - from : page_size - offset);
        for (int j = 0; j < count; j++) {
            const uint16_t *key = keys + (first + j) * dim;
            lanes products[group];
            for (int g = 0; g < group; g++) products[g] = (lanes){0};
            for (int d = 0; d < dim / LANES; d++) {
                lanes part = load(key + d * LANES);
                for (int g = 0; g < group; g++) products[g] += query[g][d] * part;
            }
            for (int g = 0; g < group; g++) weights[g][j] = sum(products[g]);
        }
        for (int g = 0; g < group; g++) {
            float peak = largest[g];
            for (int j = 0; j < count; j++) peak = weights[g][j] > peak ? weights[g][j] : peak;
            for (int j = count; j % LANES; j++) weights[g][j] = -INFINITY;
            lanes added = {0};
            for (int j = 0; j < count; j += LANES) {
                lanes weight = exponential(load_float(weights[g] + j) - peak);
                memcpy(weights[g] + j, &weight, sizeof weight);
            }
            for (int j = count; j % LANES; j++) weights[g][j] = 0;
            for (int j = 0; j < count; j += LANES) added += load_float(weights[g] + j);
            float keep = expf(largest[g] - peak);
            total[g] = total[g] * keep + sum(added);
            largest[g] = peak;
            for (int d = 0; d < dim / LANES; d++) sums[g][d] *= keep;
        }
        for (int j = 0; j < count; j++) {
            const uint16_t *value = values + (first + j) * dim;
            for (int d = 0; d < dim / LANES; d++) {
                lanes part = load(value + d * LANES);
                for (int g = 0; g < group; g++) sums[g][d] += part * weights[g][j];
            }
        }
        from += count;
    }
    for (int g = 0; g < group; g++) {
        out[g].largest = largest[g], out[g].total = total[g];
        memcpy(out[g].values, sums[g], dim * sizeof(float));
    }
}

#define ATTEND(GROUP, DIM) \
    attend_span(queries, keys, values, pages, page_size, from, to, scale, GROUP, DIM, out), queries += (GROUP) * dim, \
        out += (GROUP)

/* The group in parts whose sums stay in registers. */
static void attend_group(const uint16_t *queries, const uint16_t *keys, const uint16_t *values, const int64_t *pages,
                         int64_t page_size, int64_t from, int64_t to, float scale, int64_t group, int64_t dim,
                         partial *out) {
    if (dim == 64) {
        for (; group >= 4; group -= 4) ATTEND(4, 64);
        if (group == 3) ATTEND(3, 64);
        if (group == 2) ATTEND(2, 64);
        if (group == 1) ATTEND(1, 64);
    } else if (dim == 128) {
        for (; group >= 2; group -= 2) ATTEND(2, 128);
        if (group == 1) ATTEND(1, 128);
    } else {
        for (; group >= 1; group -= 1) ATTEND(1, (int)dim);
    }
}

/* One query per sequence over its pages: queries [rows, query_stride], heads of one KV head adjacent; cache
 * [2, kv_heads, slots_total, dim]; pages [rows, width]; lengths [rows]; out [rows, heads, dim]. Returns 0, or -1 when
 * memory is short. */
int attend_decode(const uint16_t *queries, const uint16_t *cache, const int64_t *pages, const int64_t *lengths,
                  uint16_t *out, int64_t rows, int64_t query_stride, int64_t heads, int64_t kv_heads, int64_t dim,
                  int64_t slots_total, int64_t width, int64_t page_size) {
    int64_t group = heads / kv_heads, longest = 0, positions = 0;
    for (int64_t row = 0; row < rows; row++) {
        longest = lengths[row] > longest ? lengths[row] : longest;
        positions += lengths[row];
    }
    int64_t spans = (longest + SPAN - 1) / SPAN, items = rows * kv_heads * spans;
    float scale = 1.0f / sqrtf((float)dim);
    partial *parts = malloc(items * group * sizeof *parts);
    if (!parts) return -1;
#pragma omp parallel if (positions * heads * dim > PARALLEL_WORK)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; item++) {
            int64_t row = item / (kv_heads * spans), head = item / spans % kv_heads, from = item % spans * SPAN;
            int64_t to = from + SPAN < lengths[row] ? from + SPAN : lengths[row];
            if (from >= to) continue;
            const uint16_t *keys = cache + head * slots_total * dim;
            const uint16_t *values = cache + (kv_heads + head) * slots_total * dim;
            attend_group(queries + row * query_stride + head * group * dim, keys, values, pages + row * width, page_size,
                         from, to, scale, group, dim, parts + item * group);
        }
#pragma omp for
        for (int64_t query = 0; query < rows * heads; query++) {
            int64_t row = query / heads, head = query % heads, used = (lengths[row] + SPAN - 1) / SPAN;
            const partial *first = parts + (row * kv_heads + head / group) * spans * group + head % group;
            float largest = -INFINITY, total = 0;
            for (int64_t s = 0; s < used; s++)
                largest = first[s * group].largest > largest ? first[s * group].largest : largest;
            float shares[used];
            for (int64_t s = 0; s < used; s++) {
                shares[s] = expf(first[s * group].largest - largest);
                total += first[s * group].total * shares[s];
            }
            for (int64_t i = 0; i < dim; i += LANES) {
                lanes value = {0};
                for (int64_t s = 0; s < used; s++) value += load_float(first[s * group].values + i) * shares[s];
                store(out + query * dim + i, value / total);
            }
        }
    }
    free(parts);
    return 0;
}
