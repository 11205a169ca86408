/* Log-probabilities of tokens, and the likeliest tokens of each row of logits. */
#include "graph.h"
#include "selection.h"

/* Insert a logit into the `count` largest ones, which are in descending order. Equal logits stay in the order of their
 * insertion. Return the new number of logits, at most `most`. */
static int64_t insert(float *logits, int64_t *ids, int64_t count, int64_t most, float logit, int64_t id) {
    int64_t place = count < most ? count : most - 1;
    for (; place > 0 && logits[place - 1] < logit; place--)
        logits[place] = logits[place - 1], ids[place] = ids[place - 1];
    logits[place] = logit, ids[place] = id;
    return count < most ? count + 1 : most;
}

KERNEL(log_probabilities, item) {
    if (item < 0) return a->rows;
    int64_t row = a->chosen ? a->chosen[item] : item, block = block_of(a->width), token = a->tokens[row];
    int64_t *ids = a->ids + item * a->likeliest, count = 0;
    float *values = a->values + item * a->likeliest, peaks[MAX_BLOCKS];
    distribution d = {.x = a->x + row * a->width, .width = a->width, .scale = LOG2_E};
    d.peak = block_peaks(d.x, d.width, block, peaks);
    if (!isfinite(d.peak)) {
        for (int64_t i = 0; i < a->likeliest; i++) ids[i] = i, values[i] = NAN;
        a->out[item] = NAN;
        return 0;
    }
    double mass = log(whole_mass(&d));
    a->out[item] = token >= 0 && token < a->width ? (float)(d.x[token] - d.peak - mass) : NAN;
    if (!a->likeliest) return 0;
    float bound = reached_by(peaks, (d.width + block - 1) / block, a->likeliest);
    for (int64_t start = 0; start < d.width; start += block) {
        if (peaks[start / block] < bound) continue;
        for (int64_t i = start; i < d.width && i < start + block; i++)
            if (count < a->likeliest || d.x[i] > values[count - 1])
                count = insert(values, ids, count, a->likeliest, d.x[i], i);
    }
    for (int64_t i = 0; i < count; i++) values[i] = (float)(values[i] - d.peak - mass);
    return 0;
}
