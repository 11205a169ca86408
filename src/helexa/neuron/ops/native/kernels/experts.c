/* Mixtures of experts. A pair is a row and one of its experts. Pairs are sorted by expert, then by row, so that the
 * pairs of an expert are consecutive rows of one product. The number of pairs per expert is known only at run time:
 * kernels read the first pair of each expert from `starts`. */
#include "lanes.h"
#include "graph.h"

int64_t multiply(const multiply_arguments *, int64_t), multiply_plain(const multiply_plain_arguments *, int64_t);
int64_t quantize(const quantize_arguments *, int64_t);

/* Find the `chosen` experts with the largest scores, and write their indexes in ascending order. The lower index wins a
 * tie. */
static void choose(const float *scores, int64_t experts, int64_t chosen, int64_t *picked) {
    float best[chosen];
    for (int64_t expert = 0; expert < experts; expert++) {
        float score = scores[expert] == scores[expert] ? scores[expert] : -INFINITY;
        int64_t place = expert < chosen ? expert : chosen;
        while (place > 0 && score > best[place - 1]) place--;
        if (place == chosen) continue;
        for (int64_t i = (expert < chosen ? expert : chosen - 1); i > place; i--) best[i] = best[i - 1], picked[i] = picked[i - 1];
        best[place] = score, picked[place] = expert;
    }
    for (int64_t i = 1; i < chosen; i++) {
        int64_t expert = picked[i], place = i;
        for (; place > 0 && picked[place - 1] > expert; place--) picked[place] = picked[place - 1];
        picked[place] = expert;
    }
}

/* Replace the ranks of all experts outside the best groups by -INFINITY. */
static void keep_best_groups(const route_arguments *a, float *ranks) {
    int64_t size = a->experts / a->groups, kept[a->groups], place = 0;
    float best[a->groups];
    for (int64_t group = 0; group < a->groups; group++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = 0; i < size; i++) {
            float rank = ranks[group * size + i];
            if (rank > first) second = first, first = rank;
            else if (rank > second) second = rank;
        }
        best[group] = a->summed == 1 ? first : first + second;
    }
    choose(best, a->groups, a->chosen_groups, kept);
    for (int64_t group = 0; group < a->groups; group++) {
        if (place < a->chosen_groups && kept[place] == group) {
            place++;
            continue;
        }
        for (int64_t i = 0; i < size; i++) ranks[group * size + i] = -INFINITY;
    }
}

/* Write the value and the rank of each expert. Both arrays have MAX_EXPERTS elements. */
static void rank_experts(const route_arguments *a, const float *scores, float *values, float *ranks) {
    int64_t experts = a->experts;
    float peak = -INFINITY, total = 0;
    for (int64_t i = 0; i < experts; i++) values[i] = scores[i], peak = fmaxf(peak, scores[i]);
    for (int64_t i = experts; i % LANES; i++) values[i] = 0;
    for (int64_t i = 0; i < experts; i += LANES) {
        lanes score = load(values + i);
        lanes value = a->sigmoids ? sigmoid(score) : power_of_two(larger((score - peak) * LOG2_E, all(-126.0f)));
        store(values + i, where(score == score, value, score));
    }
    for (int64_t i = 0; i < experts && !a->sigmoids; i++) total += values[i];
    for (int64_t i = 0; i < experts; i++) {
        if (!a->sigmoids) values[i] /= total;
        ranks[i] = values[i] + (a->bias ? a->bias[i] : 0.0f);
    }
    if (a->groups > 1) keep_best_groups(a, ranks);
}

KERNEL(route, item) {
    int64_t *starts = a->starts, *places = a->places;
    int64_t rows = a->rows, experts = a->experts, chosen = a->chosen, normalized = a->normalized, next[MAX_EXPERTS];
    float values[MAX_EXPERTS], ranks[MAX_EXPERTS];
    if (item < 0) return 1;
    memset(starts, 0, (experts + 1) * sizeof *starts);
    for (int64_t row = 0; row < rows; row++) {
        const float *row_scores = a->scores + row * experts;
        int64_t *picked = places + row * chosen;
        float *weight = a->weights + row * chosen, peak = -INFINITY, total = 0;
        if (a->by_scores) {
            choose(row_scores, experts, chosen, picked);
            for (int64_t i = 0; i < chosen; i++) peak = fmaxf(peak, row_scores[picked[i]]);
            for (int64_t i = 0; i < chosen; i++) weight[i] = expf(row_scores[picked[i]] - peak), total += normalized ? weight[i] : 0;
            for (int64_t expert = 0; expert < experts && !normalized; expert++) total += expf(row_scores[expert] - peak);
        } else {
            rank_experts(a, row_scores, values, ranks);
            choose(ranks, experts, chosen, picked);
            for (int64_t i = 0; i < chosen; i++) weight[i] = values[picked[i]], total += normalized ? weight[i] : 0;
            total = normalized ? total + 1e-20f : 1; /* all sigmoids may underflow to 0 */
        }
        for (int64_t i = 0; i < chosen; i++) {
            weight[i] /= total;
            if (a->factors) weight[i] *= a->factors[picked[i]];
            starts[picked[i] + 1]++;
        }
    }
    for (int64_t expert = 0; expert < experts; expert++) next[expert] = starts[expert], starts[expert + 1] += starts[expert];
    for (int64_t i = 0; i < rows * chosen; i++) {
        places[i] = next[places[i]]++;
        a->pairs[places[i]] = (int32_t)(i / chosen);
    }
    return 0;
}

/* A kernel for one expert, whose `count` pairs begin at pair `start`. Runs item `item` of the expert; for item -1,
 * returns the expert's number of items. */
typedef int64_t of_expert(const void *arguments, int64_t expert, int64_t start, int64_t count, int64_t item);

/* The expert of this thread's last item, and the number of items of the experts before it. A thread runs most items in
 * ascending order, so the search for the next item starts at this expert. */
static _Thread_local struct {
    int64_t expert, items;
} last;

/* Run item `item`. The items of all experts are numbered consecutively, one expert after another. For item -1, with
 * which every thread begins a kernel, return the number of items. */
INLINE int64_t each_expert(const int64_t *starts, int64_t experts, const void *arguments, int64_t item,
                           of_expert *run) {
    if (item < last.items) last.expert = last.items = 0;
    for (; last.expert < experts; last.expert++) {
        int64_t start = starts[last.expert], count = starts[last.expert + 1] - start;
        int64_t items = count ? run(arguments, last.expert, start, count, -1) : 0;
        if (item >= 0 && item < last.items + items)
            return run(arguments, last.expert, start, count, item - last.items);
        last.items += items;
    }
    int64_t total = last.items;
    last.expert = last.items = 0;
    return total;
}

INLINE int64_t quantize_one(const void *arguments, int64_t expert, int64_t start, int64_t count, int64_t item) {
    const quantize_experts_arguments *a = arguments;
    quantize_arguments one_expert = {
        .x = a->x + start * a->columns * (a->gate ? 2 : 1),
        .out = a->out + start * a->columns / GROUP * BLOCK_BYTES,
        .rows = count,
        .columns = a->columns,
        .gate = a->gate,
        .x_bits = a->x_bits,
    };
    (void)expert;
    return quantize(&one_expert, item);
}

KERNEL(quantize_experts, item) { return each_expert(a->starts, a->experts, a, item, quantize_one); }

INLINE int64_t multiply_one(const void *arguments, int64_t expert, int64_t start, int64_t count, int64_t item) {
    const multiply_experts_arguments *a = arguments;
    multiply_arguments one_expert = {
        .x = (const uint8_t *)a->x + start * a->columns / GROUP * BLOCK_BYTES,
        .matrix = (const uint8_t *)a->matrices[expert],
        .out = a->out + start * a->stride,
        .bias = a->bias ? a->bias + expert * a->stride : NULL,
        .rows = count,
        .columns = a->columns,
        .outputs = a->outputs,
        .stride = a->stride,
        .number = a->number,
    };
    return multiply(&one_expert, item);
}

INLINE int64_t multiply_one_plain(const void *arguments, int64_t expert, int64_t start, int64_t count, int64_t item) {
    const multiply_experts_arguments *a = arguments;
    multiply_plain_arguments one_expert = {
        .x = (const bfloat16 *)a->x + start * a->columns,
        .matrix = (const uint8_t *)a->matrices[expert],
        .out = a->out + start * a->stride,
        .bias = a->bias ? a->bias + expert * a->stride : NULL,
        .rows = count,
        .columns = a->columns,
        .outputs = a->outputs,
        .stride = a->stride,
    };
    return multiply_plain(&one_expert, item);
}

KERNEL(multiply_experts, item) {
    return each_expert(a->starts, a->experts, a, item, a->number < 0 ? multiply_one_plain : multiply_one);
}

KERNEL(clamp_gate_up, item) {
    int64_t width = a->width;
    float *gate = a->gate_up + item * 2 * width, *up = gate + width, alpha = a->alpha, limit = a->limit;
    if (item < 0) return a->rows;
    for (int64_t i = 0; i < width; i += LANES) {
        lanes g = load(gate + i), u = larger(load(up + i), all(-limit));
        store(gate + i, where(g > limit, all(limit), g) * alpha);
        store(up + i, (where(u > limit, all(limit), u) + 1.0f) / alpha);
    }
    return 0;
}

KERNEL(sum_pairs, item) {
    int64_t chosen = a->chosen, width = a->width;
    const int64_t *places = a->places + item * chosen;
    const float *weights = a->weights + item * chosen;
    if (item < 0) return a->rows;
    for (int64_t i = 0; i < width; i += LANES) {
        lanes total = {0};
        for (int64_t j = 0; j < chosen; j++) total = fused(load(a->x + places[j] * width + i), all(weights[j]), total);
        store(a->out + item * width + i, total);
    }
    return 0;
}

KERNEL(add_gated, item) {
    int64_t width = a->width;
    float *out = a->out + item * width;
    const float *x = a->x + item * width;
    if (item < 0) return a->rows;
    float share = a->gate ? 1.0f / (1.0f + expf(-a->gate[item])) : 1.0f;
    for (int64_t i = 0; i < width; i += LANES) store(out + i, fused(load(x + i), all(share), load(out + i)));
    return 0;
}
