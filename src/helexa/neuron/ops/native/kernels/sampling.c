/* Choice of a token for each row of logits: biases, penalties and a mask of allowed tokens, then the largest logit, or
 * a draw with temperature, top-k, top-p and min-p. A row's token depends only on its logits and its settings. */
#include "graph.h"
#include "selection.h"

#include <stdlib.h>

#define FIRST_CANDIDATES 256 /* minimum number of likeliest tokens to which top-p is applied first */

/* Kinds of adjustments of logits, in the order in which they are applied. */
enum { BIAS, REPETITION, PRESENCE, KINDS };

static void *allocate(int64_t size) {
    void *memory = malloc(size);
    if (memory == NULL) abort();
    return memory;
}

static double total(const float *weights, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += weights[i];
    return sum;
}

/* Select the fewest largest weights whose sum is at least `mass`, and return the smallest selected weight. If the sum
 * of all weights is less than `mass`, return the smallest weight. The weights are reordered. */
static float least_for_mass(float *weights, int64_t count, double mass) {
    for (uint32_t state = 1;;) {
        int64_t end;
        float pivot = pivot_of(weights, count, &state);
        int64_t first = part(weights, count, pivot, &end);
        double larger_mass = total(weights, first), equal_mass = pivot * (double)(end - first);
        if (first && larger_mass >= mass) count = first;
        else if (larger_mass + equal_mass >= mass || end == count) return pivot;
        else weights += end, count -= end, mass -= larger_mass + equal_mass;
    }
}

/* Return the first index at which the sum of the weights so far exceeds `target`. Only weights of at least `least`
 * count. If rounding keeps the sum below `target`, return the last index with a weight that counts and is above 0. */
static int64_t passed(const float *weights, int64_t count, float least, double target) {
    double sum = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < count; i++) {
        if (weights[i] < least || weights[i] <= 0) continue;
        sum += weights[i], last = i;
        if (sum > target) break;
    }
    return last;
}

/* Draw from the whole distribution. First select a block by the sums of the blocks, and then a token of the block. */
static int64_t draw(const distribution *d, int64_t block, double share) {
    float masses[MAX_BLOCKS], weights[block];
    int64_t blocks = 0;
    for (int64_t start = 0; start < d->width; start += block) {
        lanes mass = {0};
        for (int64_t i = start; i < d->width && i < start + block; i += LANES) mass += weights_at(d, i);
        masses[blocks++] = sum(mass);
    }
    double target = share * total(masses, blocks);
    int64_t chosen = passed(masses, blocks, 0, target), start = chosen * block;
    for (int64_t i = 0; i < block; i += LANES) store(weights + i, weights_at(d, start + i));
    return start + passed(weights, block, 0, target - total(masses, chosen));
}

/* Write the tokens with logits of at least `bound` and their weights, in ascending order, and return their number. The
 * largest logits of the blocks are `peaks`. */
static int64_t collect(const distribution *d, int64_t block, const float *peaks, float bound, int32_t *tokens,
                       float *weights) {
    int64_t count = 0;
    for (int64_t start = 0; start < d->width; start += block) {
        if (peaks[start / block] < bound) continue;
        for (int64_t i = start; i < d->width && i < start + block; i += LANES) {
            int64_t some = d->width - i < LANES ? d->width - i : LANES;
            float lane_weights[LANES];
            if (!sum_words(load_some(d->x + i, some) >= bound)) continue;
            store(lane_weights, weights_at(d, i));
            for (int64_t lane = 0; lane < some; lane++)
                if (d->x[i + lane] >= bound) tokens[count] = (int32_t)(i + lane), weights[count++] = lane_weights[lane];
        }
    }
    return count;
}

/* Draw from the tokens that top-k, then top-p and then min-p keep. Tokens of equal weight are all kept or all removed.
 * `tokens`, `weights` and `order` have room for all tokens. */
static int64_t draw_kept(const distribution *d, int64_t block, const float *peaks, int64_t top_k, float top_p,
                         float min_p, double share, int32_t *tokens, float *weights, float *order) {
    int64_t blocks = (d->width + block - 1) / block, count;
    int limited = top_k > 0 && top_k < d->width;
    double mass = !limited && top_p < 1 ? whole_mass(d) : 0;
    /* Tokens below this logit have no weight, or min-p removes them. The margin of 0.01 allows for inexact
     * logarithms. */
    float lowest = d->peak + ((min_p > 0x1p-120f ? log2f(min_p) : -126.0f) - 0.01f) / d->scale, least = 0;
    if (!limited && top_p < 1) { /* all tokens lighter than `light` together have less mass than top-p removes */
        double light = (1.0 - top_p) * mass / (double)d->width;
        float bound = d->peak + ((light > 0x1p-120 ? log2f((float)light) : -126.0f) - 0.01f) / d->scale;
        lowest = bound > lowest ? bound : lowest;
    }
    for (int64_t wanted = limited ? top_k : FIRST_CANDIDATES;; wanted *= 8) {
        float bound = limited || top_p < 1 ? reached_by(peaks, blocks, wanted) : lowest;
        bound = limited || bound > lowest ? bound : lowest;
        count = collect(d, block, peaks, bound, tokens, weights);
        memcpy(order, weights, count * sizeof *order);
        /* The tokens above the bound are the candidates. If their mass is enough for top-p, no other token is kept. */
        if (limited || bound == lowest || total(weights, count) >= top_p * mass) break;
    }
    if (limited) {
        least = kth_largest(order, count, top_k);
        int64_t end, larger_count = part(order, count, least, &end);
        mass = total(order, larger_count) + least * (double)(top_k - larger_count);
    }
    if (top_p < 1) {
        float least_of_mass = least_for_mass(order, count, top_p * mass);
        least = least_of_mass > least ? least_of_mass : least;
    }
    least = min_p > least ? min_p : least;
    double kept = 0;
    for (int64_t i = 0; i < count; i++) kept += weights[i] >= least ? weights[i] : 0;
    return tokens[passed(weights, count, least, share * kept)];
}

/* Return the first token with the logit `peak`. */
static int64_t first_of(const float *x, int64_t width, int64_t block, const float *peaks, float peak) {
    int64_t i = 0;
    while (peaks[i / block] != peak) i += block;
    while (i < width - 1 && x[i] != peak) i++;
    return i;
}

/* Return the token of the largest logit, or draw one with the random number `share`. Return NON_FINITE if the
 * largest logit is NaN or infinite. */
static int64_t choose(const float *x, int64_t width, const float *filters, double share) {
    int64_t block = block_of(width), token;
    float peaks[MAX_BLOCKS], temperature = filters[0], top_k = filters[1], top_p = filters[2], min_p = filters[3];
    distribution d = {.x = x, .width = width, .peak = block_peaks(x, width, block, peaks)};
    if (!isfinite(d.peak)) return NON_FINITE;
    d.scale = LOG2_E / temperature;
    /* A tiny temperature has an infinite scale. The limit is the greedy choice. */
    if (temperature <= 0 || !isfinite(d.scale)) return first_of(x, width, block, peaks, d.peak);
    if (top_k <= 0 && top_p >= 1 && min_p <= 0) return draw(&d, block, share);
    float *numbers = allocate(width * (2 * sizeof(float) + sizeof(int32_t)));
    token = draw_kept(&d, block, peaks, (int64_t)top_k, top_p, min_p, share, (int32_t *)(numbers + 2 * width), numbers,
                      numbers + width);
    free(numbers);
    return token;
}

/* Return a token that the mask allows. If all allowed tokens have the logit -infinity, return the first of them. */
static int64_t choose_allowed(const float *x, int64_t width, const uint8_t *mask, int64_t mask_bytes,
                              const float *filters, double share) {
    float *logits = allocate(width * (sizeof(float) + sizeof(int32_t)));
    int32_t *tokens = (int32_t *)(logits + width);
    int64_t count = 0;
    for (int64_t i = 0; i < mask_bytes && i * 8 < width; i++)
        for (uint32_t allowed = mask[i]; allowed; allowed &= allowed - 1) {
            int64_t token = i * 8 + __builtin_ctz(allowed);
            if (token < width) tokens[count] = (int32_t)token, logits[count++] = x[token];
        }
    int64_t place = count > 1 ? choose(logits, count, filters, share) : 0;
    int64_t token = count ? tokens[place < 0 ? 0 : place] : NON_FINITE;
    free(logits);
    return token;
}

/* Return the random number of a row in [0, 1), which its seed and position determine (SplitMix64; Steele, Lea and
 * Flood, 2014). `again` selects the series for the second draw, after a grammar has rejected a token. */
static float uniform(uint64_t seed, uint64_t position, int again) {
    uint64_t state = seed * 0xd1342543de82ef95u + position * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u;
    if (again) state += 0xd6e8feb86659fd93u;
    state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9u;
    state = (state ^ state >> 27) * 0x94d049bb133111ebu;
    float number = (float)((double)((state ^ state >> 31) >> 11) * 0x1p-53);
    return number < 1 ? number : 0x1.fffffep-1f; /* rounding to 1 would select the last token, even an unlikely one */
}

/* Return the token of an adjustment; -1 if it has no logit. */
static int64_t adjusted_token(const choose_tokens_arguments *a, int64_t adjustment) {
    int64_t token = a->tokens[adjustment];
    if (token < 0 && -token <= a->last_count) {
        token = a->last[a->last_count + token];
        token = token < 0 ? 0 : token; /* after NON_FINITE, the sequence ends, so any token will do */
    }
    return token < a->width ? token : -1;
}

static float adjusted(float logit, float value, int kind) {
    if (kind == BIAS) return logit + value;
    if (kind == PRESENCE) return logit - value;
    return logit > 0 ? logit / value : logit * value;
}

/* Adjust the logits x of a row. `before` gets the logits before each adjustment. The adjustments of a kind are computed
 * from the logits before all of them, so that a penalty counts once for a token that occurs twice. */
static void adjust(const choose_tokens_arguments *a, int64_t row, float *x, float *before) {
    for (int kind = 0; kind < KINDS; kind++) {
        const int32_t *start = a->starts + kind * a->samples + row;
        for (int64_t i = start[0]; i < start[1]; i++) {
            int64_t token = adjusted_token(a, i);
            before[i - start[0]] = token < 0 ? 0 : x[token];
        }
        for (int64_t i = start[0]; i < start[1]; i++) {
            int64_t token = adjusted_token(a, i);
            if (token >= 0) x[token] = adjusted(before[i - start[0]], a->values[i], kind);
        }
        before += start[1] - start[0];
    }
}

/* Undo `adjust`. `before` is the end of the logits before the adjustments. */
static void restore(const choose_tokens_arguments *a, int64_t row, float *x, const float *before) {
    for (int kind = KINDS - 1; kind >= 0; kind--) {
        const int32_t *start = a->starts + kind * a->samples + row;
        for (int64_t i = start[1] - 1; i >= start[0]; i--) {
            int64_t token = adjusted_token(a, i);
            before--;
            if (token >= 0) x[token] = *before;
        }
    }
}

KERNEL(choose_tokens, item) {
    if (item < 0) return a->rows;
    int64_t row = a->chosen ? a->chosen[item] : item, adjustments = 0;
    float *x = a->x + row * a->width, *before = NULL;
    const float *filters = a->filters + 4 * row;
    const uint8_t *mask = a->masks ? a->masks + item * a->mask_bytes : NULL;
    double share = uniform((uint64_t)a->seeds[row], (uint64_t)a->positions[row], mask != NULL);
    for (int kind = 0; a->starts && kind < KINDS; kind++)
        adjustments += a->starts[kind * a->samples + row + 1] - a->starts[kind * a->samples + row];
    if (adjustments) adjust(a, row, x, before = allocate(adjustments * sizeof *before));
    a->out[item] = mask ? choose_allowed(x, a->width, mask, a->mask_bytes, filters, share)
                        : choose(x, a->width, filters, share);
    if (adjustments) restore(a, row, x, before + adjustments);
    free(before);
    return 0;
}
