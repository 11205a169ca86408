/* Matrix products of activations with packed weights: `out[t, n] = sum over k of x[t, k] * w[n, k]`.
 *
 * Activations are rounded to codes of 16 or 8 bits with one scale per 32 columns; products of codes are summed as
 * integers. With VNNI, a code of 16 bits is 256 * upper + lower. The kernel first sums products of the upper bytes,
 * multiplies the sums by 256 and then adds products of the lower bytes. It skips quads whose upper bytes are 0 in all
 * rows that it multiplies at once. Sums of integers are exact, so other rows do not change the result of a row.
 *
 * With mixed rounding, the scale of a group fits most numbers of the row into 8 bits. Only numbers that are much larger
 * (outliers) need upper bytes. They would otherwise force a coarse scale on the 31 other columns of their group. */
#include "graph.h"
#include "tiles.h"

#define MAX_ROWS 6 /* rows of x multiplied at once; their sums stay in registers */
#if SLICE == LANES
#define MAX_TILES 2
#else
#define MAX_TILES 1 /* limited by registers */
#endif
#define CACHED 131072 /* bytes of activations per item, which stay in the L2 cache */
#define LEAST_ROWS 48 /* minimum rows per item */
#ifdef VNNI
#define UNROLL_QUADS _Pragma("GCC unroll 8")
#define PARTS 2 /* lower and upper bytes */
#else
#define UNROLL_QUADS _Pragma("GCC unroll 1") /* unrolled, GCC needs too many registers */
#define PARTS 1
#endif
#define ALL_QUADS 255
#define OUTLIER 4.0f   /* magnitude of an outlier, as a multiple of the row's mean magnitude */
#define SAMPLED 4      /* one of so many groups of a row determines its mean magnitude */
#define MOST_8 127.0f
#define MOST_16 (127 * 256 + 127.0f)

/* 32 rounded activations of one row. */
typedef struct {
    float scale, scaled_sum; /* `scaled_sum` is the sum of the rounded activations */
    int32_t first, second;   /* -32 times the sum of the codes of each half */
    int32_t upper;           /* bit j: an upper byte of quad j may differ from 0 */
    quad codes[PARTS][QUADS];
} block;
_Static_assert(sizeof(block) == BLOCK_BYTES && MAX_ROWS <= SPARE_BLOCKS, "as memory for activations is taken");

/* Add to `dots` [rows, tiles] the products of those of `count` quads from `j` on that `chosen` has bits of, with one
 * part of x: lower or upper bytes. */
INLINE void add_quads(const format f, const slice_bits table, const uint8_t *const *from, const block *x, const int part,
                      slice_words *dots, const int j, const int count, const int rows, const int tiles,
                      const int32_t chosen) {
    UNROLL_QUADS
    for (int q = j; q < j + count; q++) {
        slice_bits codes[MAX_TILES];
        if (!(chosen >> q & 1)) continue;
#pragma GCC unroll 2
        for (int t = 0; t < tiles; t++) {
            codes[t] = quad_codes(f, from[t], q);
            if (f.table) codes[t] = look_up(table, codes[t]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const quad *four = x[r].codes[part] + q;
#pragma GCC unroll 2
            for (int t = 0; t < tiles; t++) dots[r * tiles + t] = dot4(dots[r * tiles + t], codes[t], four);
        }
    }
}

/* dots [rows, tiles] = the products of `count` quads from `j` on. */
INLINE void dot_quads(const format f, const slice_bits table, const uint8_t *const *from, const block *x,
                      slice_words *dots, const int j, const int count, const int rows, const int tiles) {
    for (int i = 0; i < rows * tiles; i++) dots[i] = (slice_words){0};
    if (PARTS > 1) {
        int32_t upper = 0;
        for (int r = 0; r < rows; r++) upper |= x[r].upper;
        if (upper >> j & ((1 << count) - 1)) {
            add_quads(f, table, from, x, PARTS - 1, dots, j, count, rows, tiles, upper);
            for (int i = 0; i < rows * tiles; i++) dots[i] <<= 8;
        }
    }
    add_quads(f, table, from, x, 0, dots, j, count, rows, tiles, ALL_QUADS);
}

/* Multiply `rows` rows of x by `tiles` tiles, for the slice of lanes from `lane` on, and write `sums` [rows, tiles].
 * The tiles are `distance` bytes apart. The blocks of `stride` rows of x are interleaved. Prefetch the weights that are
 * `ahead` bytes after the read ones, unless `ahead` is 0. */
INLINE void multiply_slice(const format f, const uint8_t *matrix, const uint8_t *tile, int64_t distance, const block *x,
                           int64_t groups, int64_t stride, lanes *sums, const int rows, const int tiles, int64_t ahead,
                           int64_t lane) {
    const slice_bits table = f.table ? load_table(matrix) : (slice_bits){0};
    slice acc[MAX_ROWS * MAX_TILES];
    for (int i = 0; i < rows * tiles; i++) acc[i] = (slice){0};
    for (int64_t g = 0; g < groups; g++, x += stride) {
        slice_words dots[MAX_ROWS * MAX_TILES];
        slice scale[MAX_TILES][2], minimum[MAX_TILES][2], products[MAX_ROWS * MAX_TILES];
        const uint8_t *from[MAX_TILES];
        for (int t = 0; t < tiles; t++) {
            from[t] = lane_codes(f, tile + t * distance, g, lane);
            if (ahead) {
                const uint8_t *later = tile + t * distance + ahead + g * group_bytes(f);
                for (int64_t line = 0; line < group_bytes(f); line += 64) prefetch_weights(later + line);
            }
        }
        if (f.group == GROUP) {
            dot_quads(f, table, from, x, dots, 0, QUADS, rows, tiles);
            for (int t = 0; t < tiles; t++) unpack_scales(f, tile + t * distance, g, lane, scale[t], minimum[t]);
#pragma GCC unroll 16
            for (int i = 0; i < rows * tiles; i++) {
                const block *activations = x + i / tiles;
                if (f.table) dots[i] += f.zero / 32 * (activations->first + activations->second);
                slice product = __builtin_convertvector(dots[i], slice) * scale[i % tiles][0];
                acc[i] = slice_fused(product, fill(activations->scale), acc[i]);
                if (!f.table) acc[i] = slice_fused(minimum[i % tiles][0], fill(activations->scaled_sum), acc[i]);
            }
            continue;
        }
        dot_quads(f, table, from, x, dots, 0, QUADS / 2, rows, tiles);
        for (int t = 0; t < tiles; t++) unpack_scales(f, tile + t * distance, g, lane, scale[t], minimum[t]);
#pragma GCC unroll 16
        for (int i = 0; i < rows * tiles; i++) {
            dots[i] += f.zero / 32 * x[i / tiles].first;
            products[i] = __builtin_convertvector(dots[i], slice) * scale[i % tiles][0];
        }
        dot_quads(f, table, from, x, dots, QUADS / 2, QUADS / 2, rows, tiles);
#pragma GCC unroll 16
        for (int i = 0; i < rows * tiles; i++) {
            const block *activations = x + i / tiles;
            dots[i] += f.zero / 32 * activations->second;
            slice product = slice_fused(__builtin_convertvector(dots[i], slice), scale[i % tiles][1], products[i]);
            acc[i] = slice_fused(product, fill(activations->scale), acc[i]);
            if (f.minimum) {
                slice shift = minimum[i % tiles][0] * (float)activations->first;
                shift = slice_fused(minimum[i % tiles][1], fill((float)activations->second), shift);
                acc[i] = slice_fused(shift, fill(activations->scale * -0x1p-5f), acc[i]);
            }
        }
    }
    for (int i = 0; i < rows * tiles; i++) memcpy((float *)(sums + i) + lane, acc + i, sizeof *acc);
}

/* Products of few rows are bound by memory. Products of many rows are bound by arithmetic: two tiles share the loads
 * of x. */
#define MULTIPLY(NUMBER, STRIDE, ROWS, TILES) \
    for (int64_t lane = 0; lane < LANES; lane += SLICE) \
    multiply_slice(FORMATS[NUMBER], matrix, tile, distance, x, groups, STRIDE, sums, ROWS, TILES, ahead, lane)
#define BY_ROWS(NUMBER) \
    case NUMBER: \
        if (rows == 1) MULTIPLY(NUMBER, 1, 1, 1); \
        else if (rows == 2) MULTIPLY(NUMBER, 2, 2, 1); \
        else if (rows <= 4) MULTIPLY(NUMBER, rows, 4, 1); \
        else if (MAX_TILES == 1 || tiles == 1) MULTIPLY(NUMBER, rows, MAX_ROWS, 1); \
        else MULTIPLY(NUMBER, rows, MAX_ROWS, MAX_TILES); \
        return;

/* Multiply up to MAX_ROWS rows. The function may also multiply blocks after the last row. Callers ignore the results of
 * these blocks. */
static void multiply_any(int64_t number, const uint8_t *matrix, const uint8_t *tile, int64_t distance, const block *x,
                         int64_t groups, lanes *sums, int64_t rows, int64_t tiles, int64_t ahead) {
    switch (number) { EACH_FORMAT(BY_ROWS) }
}

INLINE void put(float *out, lanes value, int64_t count) {
    if (count == LANES)
        store(out, value);
    else
        memcpy(out, &value, count * sizeof *out);
}

/* Return the number of rows that one item multiplies: few enough for the L2 cache and an even load of the threads, and
 * many enough that each tile is loaded only a few times. */
static int64_t rows_per_item(int64_t groups) {
    int64_t rows = CACHED / (groups * (int64_t)sizeof(block));
    return (rows < LEAST_ROWS ? LEAST_ROWS : rows) / MAX_ROWS * MAX_ROWS;
}

/* Return the number of tiles per item: enough work to justify an item and to read weights ahead, but few enough for an
 * even load of the threads. */
static int64_t tiles_per_item(int64_t tiles, int64_t bytes, int64_t rows) {
    int64_t enough = 24576 / bytes / rows + 8 * MAX_TILES, even = tiles / (8 * threads());
    return even < 1 ? 1 : even < enough ? even : enough;
}

KERNEL(multiply, item) {
    const block *x = (const block *)a->x;
    float *out = a->out;
    int64_t rows = a->rows, groups = a->columns / GROUP, outputs = a->outputs, stride = a->stride, number = a->number;
    int64_t tiles = (outputs + LANES - 1) / LANES, bytes = tile_bytes(FORMATS[number], a->columns);
    int64_t share = tiles_per_item(tiles, bytes, rows), shares = (tiles + share - 1) / share;
    int64_t panel = rows_per_item(groups);
    if (item < 0) return shares * ((rows + panel - 1) / panel);

    const uint8_t *weights = a->matrix + head_bytes(FORMATS[number]);
    int64_t first = item % shares * share, last = first + share < tiles ? first + share : tiles;
    int64_t begin = item / shares * panel, end = begin + panel < rows ? begin + panel : rows;
    for (int64_t row = begin; row < end; row += MAX_ROWS) {
        int64_t together = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
        int64_t pair = together > MAX_ROWS - 2 ? MAX_TILES : 1;
        for (int64_t tile = first, width; tile < last; tile += width) {
            lanes sums[MAX_ROWS * MAX_TILES];
            width = last - tile < pair ? 1 : pair;
            for (int64_t r = 0; r < together; r++) /* prefetch the output while the product runs */
                for (int64_t t = 0; t < width; t++)
                    __builtin_prefetch(out + (row + r) * stride + (tile + t) * LANES, 1);
            int64_t ahead = row > begin ? 0 : width > 1 ? width * bytes : AHEAD;
            multiply_any(number, a->matrix, weights + tile * bytes, bytes, x + row * groups, groups, sums, together,
                         width, ahead);
            for (int64_t t = 0; t < width; t++) {
                int64_t at = (tile + t) * LANES, count = outputs - at < LANES ? outputs - at : LANES;
                lanes offset = {0};
                if (a->bias) memcpy(&offset, a->bias + at, count * sizeof offset[0]);
                for (int64_t r = 0; r < together; r++)
                    put(out + (row + r) * stride + at, sums[r * width + t] + offset, count);
            }
        }
    }
    return 0;
}

/* Round 32 numbers. The scale fits numbers up to `limit` into codes of 8 bits, or all numbers into 16 bits if `limit` is
 * negative. The scale is NaN if any number is infinite or NaN. */
INLINE void round_group(block *to, lanes low, lanes high, float limit) {
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
        words codes = (words)(values[half] + 12582912.0f) - 0x4b400000;
        quad *quads = to->codes[0] + half * QUADS / 2;
#if defined(VNNI)
        words uppers = (codes + 128) >> 8;
        bytes16 narrow[PARTS] = {__builtin_convertvector(codes - (uppers << 8), bytes16),
                                 __builtin_convertvector(uppers, bytes16)};
        for (int part = 0; part < PARTS; part++) memcpy(quads + part * QUADS, narrow + part, sizeof *narrow);
        upper |= nonzero(quads + QUADS) << (half * QUADS / 2);
#else
        uint64_t twos[QUADS], low = 0x0000ffff0000ffff;
        memcpy(twos, &codes, sizeof twos);
        for (int q = 0; q < QUADS / 2; q++) {
            uint64_t four = (twos[2 * q] & low) | (twos[2 * q + 1] & low) << 16;
            memcpy(quads + q, &four, sizeof four);
        }
#endif
        sums[half] = sum_words(codes);
    }
    to->scale = scale + off;
    to->scaled_sum = to->scale * (float)(sums[0] + sums[1]);
    to->first = -32 * sums[0], to->second = -32 * sums[1];
    to->upper = upper;
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

INLINE void round_row(block *to, const float *from, int64_t groups, int64_t distance, const int gate, int64_t x_bits) {
    float limit = x_bits == 16 ? -1.0f : __FLT_MAX__;
    if (x_bits == MIXED) limit = outlier_size(from, groups, gate);
    for (int64_t g = 0; g < groups; g++, to += distance, from += GROUP) {
        lanes low = activation(from, groups * GROUP, gate), high = activation(from + LANES, groups * GROUP, gate);
        round_group(to, low, high, limit);
    }
}

/* Round rows to blocks; the blocks of MAX_ROWS rows are interleaved. */
KERNEL(quantise, item) {
    block *out = (block *)a->out;
    int64_t rows = a->rows, columns = a->columns, gate = a->gate, groups = columns / GROUP;
    if (item < 0) return (rows + 3) / 4;
    for (int64_t row = item * 4; row < rows && row < item * 4 + 4; row++) {
        int64_t start = row / MAX_ROWS * MAX_ROWS, together = rows - start < MAX_ROWS ? rows - start : MAX_ROWS;
        block *to = out + start * groups + (row - start);
        const float *from = a->x + row * columns * (gate ? 2 : 1);
#define ROUND(GATE) \
    if (gate == GATE) round_row(to, from, groups, together, GATE, a->x_bits);
        ROUND(0) ROUND(SILU) ROUND(GELU_TANH)
    }
    return 0;
}
