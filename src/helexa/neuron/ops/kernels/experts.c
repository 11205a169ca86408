/* Mixtures of experts. A row and one of its experts are a pair; pairs lie in ascending order of experts, then of rows, so
 * that the pairs of an expert are rows of one product. How many they are is known only while a tape runs: `starts`
 * int64 [experts + 1] says where those of each expert begin, and kernels that go through experts ask it.
 */
#include "lanes.h"
#include "tape.h"

#define BLOCK 80 /* bytes, see products.c */
#define GROUP 32

extern kernel multiply, multiply_plain, quantise;

/* The `chosen` experts with the largest of `scores`, of equals the first; in ascending order. */
static void choose(const float *scores, int64_t experts, int64_t chosen, int64_t *found) {
    float best[chosen];
    for (int64_t expert = 0; expert < experts; expert++) {
        float score = scores[expert] == scores[expert] ? scores[expert] : -INFINITY;
        int64_t place = expert < chosen ? expert : chosen;
        while (place > 0 && score > best[place - 1]) place--;
        if (place == chosen) continue;
        for (int64_t i = (expert < chosen ? expert : chosen - 1); i > place; i--) best[i] = best[i - 1], found[i] = found[i - 1];
        best[place] = score, found[place] = expert;
    }
    for (int64_t i = 1; i < chosen; i++) {
        int64_t expert = found[i], place = i;
        for (; place > 0 && found[place - 1] > expert; place--) found[place] = found[place - 1];
        found[place] = expert;
    }
}

/* scores [rows, experts] -> the pairs' rows int32 [rows * chosen], starts; for each row its pairs int64 [rows, chosen] and
 * their weights float32 [rows, chosen]: shares of the softmax over all experts, or over those chosen if `normalised`. */
int64_t route(const int64_t *a, int64_t item) {
    const float *scores = (const float *)a[0];
    int32_t *pairs = (int32_t *)a[1];
    int64_t *starts = (int64_t *)a[2], *places = (int64_t *)a[3];
    float *weights = (float *)a[4];
    int64_t rows = a[5], experts = a[6], chosen = a[7], normalised = a[8], next[experts];
    if (item < 0) return 1;
    memset(starts, 0, (experts + 1) * sizeof *starts);
    for (int64_t row = 0; row < rows; row++) {
        const float *of = scores + row * experts;
        int64_t *found = places + row * chosen;
        float *weight = weights + row * chosen, peak = -INFINITY, total = 0;
        choose(of, experts, chosen, found);
        for (int64_t i = 0; i < chosen; i++) peak = fmaxf(peak, of[found[i]]);
        for (int64_t i = 0; i < chosen; i++) weight[i] = expf(of[found[i]] - peak), total += normalised ? weight[i] : 0;
        for (int64_t expert = 0; expert < experts && !normalised; expert++) total += expf(of[expert] - peak);
        for (int64_t i = 0; i < chosen; i++) weight[i] /= total, starts[found[i] + 1]++;
    }
    for (int64_t expert = 0; expert < experts; expert++) next[expert] = starts[expert], starts[expert + 1] += starts[expert];
    for (int64_t i = 0; i < rows * chosen; i++) {
        places[i] = next[places[i]]++;
        pairs[places[i]] = (int32_t)(i / chosen);
    }
    return 0;
}

/* Goes through the items of `run` with the arguments that `set` makes for each expert that has pairs. */
typedef void arguments_of(const int64_t *a, int64_t expert, int64_t start, int64_t count, int64_t *arguments);

INLINE int64_t each_expert(const int64_t *a, int64_t item, kernel *run, arguments_of *set) {
    const int64_t *starts = (const int64_t *)a[0];
    int64_t experts = a[1], items = 0;
    for (int64_t expert = 0; expert < experts; expert++) {
        int64_t start = starts[expert], count = starts[expert + 1] - start, arguments[MAX_ARGUMENTS];
        if (!count) continue;
        set(a, expert, start, count, arguments);
        int64_t own = run(arguments, -1);
        if (item >= 0 && item < items + own) return run(arguments, item - items);
        items += own;
    }
    return items;
}

static void set_quantise(const int64_t *a, int64_t expert, int64_t start, int64_t count, int64_t *to) {
    (void)expert;
    int64_t columns = a[4], gated = a[5], x_bits = a[6];
    to[0] = a[2] + start * columns * (gated ? 8 : 4), to[1] = a[3] + start * columns / GROUP * BLOCK;
    to[2] = count, to[3] = columns, to[4] = gated, to[5] = x_bits;
}

/* starts, experts, x float32 [pairs, columns], blocks, columns, gated, bits: `quantise` for the pairs of each expert. */
int64_t quantise_experts(const int64_t *a, int64_t item) { return each_expert(a, item, quantise, set_quantise); }

static void set_multiply(const int64_t *a, int64_t expert, int64_t start, int64_t count, int64_t *to) {
    int64_t columns = a[6], stride = a[8], number = a[9];
    to[0] = a[2] + start * (number < 0 ? 2 * columns : columns / GROUP * BLOCK), to[1] = ((const int64_t *)a[3])[expert];
    to[2] = a[4] + start * stride * 4, to[3] = a[5] ? a[5] + expert * stride * 4 : 0;
    to[4] = count, to[5] = columns, to[6] = a[7], to[7] = stride, to[8] = number, to[9] = a[10];
}

/* starts, experts, x (blocks, or bfloat16), weights int64 [experts] (addresses), out float32 [pairs, stride],
 * bias float32 [experts, stride] or null, columns, outputs, stride, number (of the format, -1 for bfloat16), bits. */
int64_t multiply_experts(const int64_t *a, int64_t item) {
    return a[9] < 0 ? each_expert(a, item, multiply_plain, set_multiply) : each_expert(a, item, multiply, set_multiply);
}

/* gate_up [pairs, 2 * width], in place, so that silu(gate) * up becomes gate * sigmoid(alpha * gate) * (up + 1), with both
 * at most `limit`, and up at least -limit. */
int64_t clamp_gate_up(const int64_t *a, int64_t item) {
    int64_t rows = a[1], width = a[2];
    float *gate = (float *)a[0] + item * 2 * width, *up = gate + width, alpha, limit;
    memcpy(&alpha, a + 3, sizeof alpha), memcpy(&limit, a + 4, sizeof limit);
    if (item < 0) return rows;
    for (int64_t i = 0; i < width; i += LANES) {
        lanes g = load(gate + i), u = larger(load(up + i), all(-limit));
        store(gate + i, where(g > limit, all(limit), g) * alpha);
        store(up + i, (where(u > limit, all(limit), u) + 1.0f) / alpha);
    }
    return 0;
}

/* out [rows, width] = the weighted sum of each row's pairs of x [pairs, width]. */
int64_t sum_pairs(const int64_t *a, int64_t item) {
    const float *x = (const float *)a[0];
    int64_t rows = a[4], chosen = a[5], width = a[6];
    const int64_t *places = (const int64_t *)a[1] + item * chosen;
    const float *weights = (const float *)a[2] + item * chosen;
    float *out = (float *)a[3] + item * width;
    if (item < 0) return rows;
    for (int64_t i = 0; i < width; i += LANES) {
        lanes total = {0};
        for (int64_t j = 0; j < chosen; j++) total = fused(load(x + places[j] * width + i), all(weights[j]), total);
        store(out + i, total);
    }
    return 0;
}

/* out [rows, width] += x * sigmoid(gate), one gate for each row. */
int64_t add_gated(const int64_t *a, int64_t item) {
    int64_t rows = a[3], width = a[4];
    float *out = (float *)a[0] + item * width;
    const float *x = (const float *)a[1] + item * width;
    if (item < 0) return rows;
    float share = 1.0f / (1.0f + expf(-((const float *)a[2])[item]));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, fused(load(x + i), all(share), load(out + i)));
    return 0;
}
