/* Functions on a row of logits that sampling and log-probabilities share: its peak, its mass and its largest logits. */
#ifndef SELECTION_H
#define SELECTION_H

#include "lanes.h"

#define MAX_BLOCKS 4096 /* maximum blocks of a row; the largest logit of each block is found first */

/* Unnormalized probabilities of a row: the weight of a logit is 2^((logit - peak) * scale), and 1 for the peak. */
typedef struct {
    const float *x; /* [width] */
    int64_t width;
    float peak, scale;
} distribution;

/* Load up to 16 numbers. Missing numbers are -infinity. */
INLINE lanes load_some(const float *from, int64_t count) {
    if (count >= LANES) return load(from);
    float some[LANES];
    for (int64_t i = 0; i < LANES; i++) some[i] = i < count ? from[i] : -INFINITY;
    return load(some);
}

/* Return the weights of 16 tokens. The weight of tokens far below the peak is 0. */
INLINE lanes weights_at(const distribution *d, int64_t i) {
    lanes exponent = (load_some(d->x + i, d->width - i) - all(d->peak)) * all(d->scale);
    return where(exponent >= -126.0f, power_of_two(exponent), all(0.0f));
}

/* Return the size of the blocks of a row: at most MAX_BLOCKS blocks, and at least 64 logits. */
INLINE int64_t block_of(int64_t width) {
    int64_t block = LANES * 4;
    while (block * MAX_BLOCKS < width) block *= 2;
    return block;
}

/* Return the largest number of a row, or NaN if any number is NaN. `out` gets the largest number of each block. */
INLINE float block_peaks(const float *x, int64_t width, int64_t block, float *out) {
    float peak = -INFINITY;
    words missing = {0};
    for (int64_t start = 0; start < width; start += block) {
        lanes most = all(-INFINITY);
        for (int64_t i = start; i < width && i < start + block; i += LANES) {
            lanes value = load_some(x + i, width - i);
            most = where(value > most, value, most);
            missing |= value != value;
        }
        *out = largest(most);
        peak = *out > peak ? *out : peak;
        out++;
    }
    return sum_words(missing) ? NAN : peak;
}

/* Partition `values` into numbers larger than `pivot`, equal to it and smaller. Return the index of the first equal
 * number, and set `end` to the index of the first smaller number. */
INLINE int64_t part(float *values, int64_t count, float pivot, int64_t *end) {
    int64_t first = 0, i = 0, last = count;
    while (i < last) {
        float value = values[i];
        if (value > pivot) values[i++] = values[first], values[first++] = value;
        else if (value < pivot) values[i] = values[--last], values[last] = value;
        else i++;
    }
    *end = last;
    return first;
}

/* Return one of `count` numbers, from a pseudo-random place. With a fixed place, selection from ordered numbers is
 * slow. */
INLINE float pivot_of(const float *values, int64_t count, uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return values[(int64_t)((uint64_t)*state * (uint64_t)count >> 32)];
}

/* Return the k-th largest of `count` >= k >= 1 numbers, which are reordered. */
INLINE float kth_largest(float *values, int64_t count, int64_t k) {
    for (uint32_t state = 1;;) {
        int64_t end, pivot_index;
        float pivot = pivot_of(values, count, &state);
        pivot_index = part(values, count, pivot, &end);
        if (k <= pivot_index) count = pivot_index;
        else if (k <= end) return pivot;
        else values += end, count -= end, k -= end;
    }
}

/* Return a logit that at least `count` tokens reach: the count-th largest of the largest logits of groups of blocks.
 * Selection is faster among few groups. With 4 groups per token, only about 15 % more tokens reach the logit. */
INLINE float reached_by(const float *peaks, int64_t blocks, int64_t count) {
    float order[MAX_BLOCKS];
    if (count > blocks) return -INFINITY;
    memcpy(order, peaks, blocks * sizeof *order);
    for (int64_t groups = (blocks + 1) / 2; groups >= 4 * count; groups = (blocks + 1) / 2) {
        for (int64_t i = 0; i < blocks / 2; i++) order[i] = order[groups + i] > order[i] ? order[groups + i] : order[i];
        blocks = groups;
    }
    return kth_largest(order, blocks, count);
}

/* Return the sum of the weights of all tokens of a row. */
INLINE double whole_mass(const distribution *d) {
    double mass = 0;
    for (int64_t start = 0; start < d->width; start += 64 * LANES) {
        lanes some = {0};
        for (int64_t i = start; i < d->width && i < start + 64 * LANES; i += LANES) some += weights_at(d, i);
        mass += sum(some);
    }
    return mass;
}

#endif
