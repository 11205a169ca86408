/* Causal convolutions over the last tokens of each sequence. Every token is computed with the same operations, so the
 * results do not depend on the division of a prompt into steps. */
#include "lanes.h"
#include "graph.h"

#define CONVOLVED 128 /* columns per item */

INLINE int64_t column_blocks(int64_t width) { return (width + CONVOLVED - 1) / CONVOLVED; }

INLINE int64_t last_column(int64_t first, int64_t width) {
    return first + CONVOLVED < width ? first + CONVOLVED : width;
}

INLINE lanes initial_sum(const float *bias, int64_t i) { return bias ? load(bias + i) : (lanes){0}; }

KERNEL(convolve, item) {
    int64_t width = a->width, past = a->taps - 1, blocks = column_blocks(width);
    if (item < 0) return *a->span_count * blocks;
    const span *s = a->spans + item / blocks;
    int64_t first = item % blocks * CONVOLVED, last = last_column(first, width);
    const float *x = a->x + s->row * a->stride, zeros[LANES] = {0};
    float *state = a->state + s->slot * past * width, *out = a->out + s->row * width;
    const float *inputs[a->taps];
    for (int64_t t = 0; t < s->rows; t++) {
        int64_t begin = s->initial && t < past ? past - t : 0; /* inputs before the first token are 0 */
        for (int64_t tap = begin, token = t + tap - past; tap <= past; tap++, token++)
            inputs[tap] = token >= 0 ? x + token * a->stride : state + (past + token) * width;
        for (int64_t i = first; i < last; i += LANES) {
            lanes total = initial_sum(a->bias, i);
            for (int64_t tap = begin; tap <= past; tap++)
                total = fused(load(inputs[tap] + i), load(a->weights + tap * width + i), total);
            store(out + t * width + i, gated(total, SILU));
        }
    }
    for (int64_t place = 0; place < past; place++) { /* in ascending order, because inputs move to lower places */
        int64_t token = s->settled + place - past;
        for (int64_t i = first; i < last; i += LANES) {
            const float *input = token >= 0   ? x + token * a->stride + i
                                 : s->initial ? zeros
                                              : state + (past + token) * width + i;
            store(state + place * width + i, load(input));
        }
    }
    return 0;
}

KERNEL(gated_convolve, item) {
    int64_t width = a->width, past = a->taps - 1, blocks = column_blocks(width);
    if (item < 0) return *a->span_count * blocks;
    const span *s = a->spans + item / blocks;
    int64_t first = item % blocks * CONVOLVED, last = last_column(first, width);
    float *state = a->state + s->slot * past * width;
    for (int64_t i = first; i < last; i += LANES) {
        const float *b = a->x + s->row * 3 * width + i, *c = b + width, *v = c + width;
        float *out = a->out + s->row * width + i;
        lanes inputs[a->taps]; /* of the current token and the tokens before it */
        for (int64_t tap = 0; tap < past; tap++)
            inputs[tap] = s->initial ? (lanes){0} : load(state + tap * width + i);
        for (int64_t t = 0; t < s->rows; t++) {
            int64_t row = t * 3 * width;
            inputs[past] = load(b + row) * load(v + row);
            lanes total = initial_sum(a->bias, i);
            for (int64_t tap = 0; tap <= past; tap++)
                total = fused(inputs[tap], load(a->weights + tap * width + i), total);
            store(out + t * width, load(c + row) * total);
            for (int64_t tap = 0; tap < past; tap++) inputs[tap] = inputs[tap + 1];
            if (t + 1 == s->settled)
                for (int64_t tap = 0; tap < past; tap++) store(state + tap * width + i, inputs[tap]);
        }
    }
    return 0;
}
