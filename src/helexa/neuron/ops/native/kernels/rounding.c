/* Rounding of activations to codes of 16 or 8 bits, with one scale per 32 columns.
 *
 * With mixed rounding, the scale of a group fits most numbers of the row into 8 bits. Only numbers that are much larger
 * (outliers) need upper bytes. They would otherwise force a coarse scale on the 31 other columns of their group. */
#include "blocks.h"
#include "graph.h"

#define OUTLIER 4.0f   /* magnitude of an outlier, as a multiple of the row's mean magnitude */
#define SAMPLED 4      /* one of so many groups of a row determines its mean magnitude */
#define MOST_8 127.0f
#define MOST_16 (127 * 256 + 127.0f)

/* Round 32 numbers. The scale fits numbers up to `limit` into codes of 8 bits, or all numbers into 16 bits if `limit` is
 * negative. The scale is NaN if any number is infinite or NaN. */
INLINE void round_group(place to, lanes low, lanes high, float limit) {
    float peak = largest_size(low, high), off = peak - peak, scale = peak * (1 / MOST_16); /* `off` is 0 or NaN */
    if (off != 0.0f) low = high = (lanes){0};
    if (limit >= 0 && peak > 0) {
        float narrow = (peak < limit ? peak : limit) * (1 / MOST_8);
        scale = narrow > scale ? narrow : scale;
    }
    float inverse = peak > 1e-30f ? 1 / scale : 0.0f;
    lanes values[2] = {low * inverse, high * inverse};
    int32_t sums[2], upper = 0;
    for (int half = 0; half < 2; half++) {
        /* Adding 1.5 * 2^23 rounds to an integer in the low bits. */
        words codes = (words)(values[half] + ROUNDER) - 0x4b400000;
#if defined(VNNI)
        words uppers = (codes + 128) >> 8;
        bytes16 narrow[PARTS] = {__builtin_convertvector(codes - (uppers << 8), bytes16),
                                 __builtin_convertvector(uppers, bytes16)};
        for (int part = 0; part < PARTS; part++)
            memcpy(to.codes[part] + half * QUADS / 2, narrow + part, sizeof *narrow);
        upper |= nonzero(narrow + 1) << (half * QUADS / 2);
#else
        uint64_t twos[QUADS], low = 0x0000ffff0000ffff;
        memcpy(twos, &codes, sizeof twos);
        for (int q = 0; q < QUADS / 2; q++) {
            uint64_t four = (twos[2 * q] & low) | (twos[2 * q + 1] & low) << 16;
            memcpy(to.codes[0] + half * QUADS / 2 + q, &four, sizeof four);
        }
#endif
        sums[half] = sum_words(codes);
    }
    scale += off;
    float scaled_sum = scale * (float)(sums[0] + sums[1]);
    int32_t numbers[] = {-32 * sums[0], -32 * sums[1], upper};
    memcpy(to.fields, &scale, 4), memcpy(to.fields + to.step, &scaled_sum, 4);
    for (int i = 0; i < 3; i++) memcpy(to.fields + (2 + i) * to.step, numbers + i, 4);
}

INLINE lanes activation(const float *from, int64_t width, const int gate) {
    return gate ? gated(load(from), gate) * load(from + width) : load(from);
}

/* Return the magnitude from which on a number of the row is an outlier. */
INLINE float outlier_size(const float *from, int64_t groups, const int gate) {
    lanes total = {0};
    int64_t count = 0;
    for (int64_t g = 0; g < groups; g += SAMPLED, count += GROUP)
        for (int64_t i = 0; i < GROUP; i += LANES)
            total += (lanes)((bits)activation(from + g * GROUP + i, groups * GROUP, gate) & 0x7fffffff);
    return OUTLIER * sum(total) / (float)count;
}

/* Round the row `r` of a panel of `rows` rows, in the layout of AMX if `amx` is set. */
INLINE void round_row(block *panel, const float *from, int64_t groups, int64_t rows, int64_t r, int amx, const int gate,
                      int64_t x_bits) {
    float limit = x_bits == 16 ? -1.0f : __FLT_MAX__;
    if (x_bits == MIXED) limit = outlier_size(from, groups, gate);
    for (int64_t g = 0; g < groups; g++, panel += rows, from += GROUP) {
        lanes low = activation(from, groups * GROUP, gate), high = activation(from + LANES, groups * GROUP, gate);
        round_group(amx ? place_of_row((uint8_t *)panel, rows, r) : place_of_block(panel + r), low, high, limit);
    }
}

/* Round rows to blocks, in the order of panels (see blocks.h). */
KERNEL(quantize, item) {
    block *out = (block *)a->out;
    int64_t rows = a->rows, columns = a->columns, gate = a->gate, groups = columns / GROUP;
    if (item < 0) return (rows + 3) / 4;
    for (int64_t row = item * 4; row < rows && row < item * 4 + 4; row++) {
        int64_t start = panel_start(row, rows), together = rows_of_panel(start, rows);
        const float *from = a->x + row * columns * (gate ? 2 : 1);
#define ROUND(GATE) \
    if (gate == GATE) \
        round_row(out + start * groups, from, groups, together, row - start, has_amx_panels(rows), GATE, a->x_bits);
        ROUND(0) ROUND(SILU) ROUND(GELU_TANH)
    }
    return 0;
}
