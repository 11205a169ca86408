/* Matrix products with bfloat16 weights. A tile of 16 weight rows has the layout [columns / 2, 16, 2]: each lane holds
 * two columns of a row at once. The operations on a row of x do not depend on other rows. */
#include "slices.h"
#include "graph.h"

#define MAX_ROWS 6
#define CACHED 262144 /* bytes of activations per item, which stay in the L2 cache */
#define LEAST_ROWS 48 /* minimum rows per item */

INLINE uint32_t pair_at(const bfloat16 *from) {
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}

/* out [rows, tiles] = x [rows, columns] times `slices` slices of lanes: the slices from `lane` on of adjacent tiles, or
 * adjacent slices of one tile. Prefetch the weights that are `ahead` bytes after the read ones, unless `ahead` is 0. */
INLINE void multiply_slices(const bfloat16 *tile, const bfloat16 *x, int64_t columns, lanes *out, int64_t ahead,
                            int64_t lane, const int rows, const int slices) {
    const int64_t step = SLICE == LANES ? columns * LANES : 2 * SLICE; /* from a slice to the next one */
    slice even[MAX_ROWS][MAX_SLICES], odd[MAX_ROWS][MAX_SLICES];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < slices; t++) even[r][t] = odd[r][t] = (slice){0};
    tile += 2 * lane;
    for (int64_t k = 0; k < columns; k += 4, tile += 4 * LANES) {
        slice_bits first[MAX_SLICES], second[MAX_SLICES];
        for (int t = 0; t < slices; t++) {
            first[t] = slice_load(tile + t * step);
            second[t] = slice_load(tile + t * step + 2 * LANES);
            if (ahead && (SLICE == LANES || t == 0)) {
                const uint8_t *later = (const uint8_t *)(tile + t * step) + ahead;
                if (SLICE == LANES && slices > 1) prefetch_weights(later), prefetch_weights(later + 64);
                /* The product of one tile takes too little time for prefetches into the L2 cache. */
                else __builtin_prefetch(later), __builtin_prefetch(later + 64);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const bfloat16 *at = x + r * columns + k;
#pragma GCC unroll 4
            for (int t = 0; t < slices; t++) even[r][t] = slice_dot2(even[r][t], first[t], pair_at(at));
#pragma GCC unroll 4
            for (int t = 0; t < slices; t++) odd[r][t] = slice_dot2(odd[r][t], second[t], pair_at(at + 2));
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < slices; t++) {
            slice total = even[r][t] + odd[r][t];
            float *to = SLICE == LANES ? (float *)(out + r * slices + t) : (float *)(out + r) + t * SLICE;
            memcpy(to + lane, &total, sizeof total);
        }
}

#define MULTIPLY(COUNT, SLICES) \
    for (int64_t lane = 0; lane < LANES; lane += SLICE == LANES ? LANES : (SLICES) * SLICE) \
    multiply_slices(tile, x, columns, out, ahead, lane, COUNT, SLICES)
#define ROWS(COUNT) \
    case COUNT: \
        if (MAX_TILES > 1 && tiles == MAX_TILES) MULTIPLY(COUNT, MAX_TILES); \
        else MULTIPLY(COUNT, COUNT > 2 ? MANY_ROWS_SLICES : FEW_ROWS_SLICES); \
        return;

static void multiply_any(const bfloat16 *tile, const bfloat16 *x, int64_t columns, lanes *out, int64_t ahead,
                         int64_t rows, int64_t tiles) {
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
}

/* Products of few rows are bound by memory and read one tile at a time. Products of many rows are bound by arithmetic:
 * two tiles share the loads of x, and an item has a panel of rows that stays in the cache. */
KERNEL(multiply_plain, item) {
    const bfloat16 *weights = (const bfloat16 *)a->matrix;
    int64_t rows = a->rows, columns = a->columns, tiles = (a->outputs + LANES - 1) / LANES;
    int64_t even_share = tiles / (8 * threads()), enough = 24576 / (columns * 32) / rows + MAX_TILES;
    int64_t share = even_share < 1 ? 1 : even_share < enough ? even_share : enough, shares = (tiles + share - 1) / share;
    int64_t panel = CACHED / (columns * 2);
    panel = (panel < LEAST_ROWS ? LEAST_ROWS : panel) / MAX_ROWS * MAX_ROWS;
    if (item < 0) return shares * ((rows + panel - 1) / panel);
    int64_t first = item % shares * share, last = first + share < tiles ? first + share : tiles;
    int64_t begin = item / shares * panel, end = begin + panel < rows ? begin + panel : rows;
    int64_t most = end - begin > MAX_ROWS - 2 ? MAX_TILES : 1;
    for (int64_t tile = first, width; tile < last; tile += width) {
        lanes offset[MAX_TILES] = {0}, sums[MAX_ROWS * MAX_TILES];
        width = last - tile < most ? 1 : most;
        int64_t rest = a->outputs - tile * LANES, count = rest < width * LANES ? rest : width * LANES;
        if (a->bias) memcpy(offset, a->bias + tile * LANES, count * sizeof *a->bias);
        for (int64_t row = begin; row < end; row += MAX_ROWS) {
            int64_t together = end - row < MAX_ROWS ? end - row : MAX_ROWS;
            int64_t ahead = row > begin ? 0 : width > 1 ? width * columns * LANES * (int64_t)sizeof *weights : AHEAD;
            multiply_any(weights + tile * LANES * columns, a->x + row * columns, columns, sums, ahead, together, width);
            for (int64_t r = 0; r < together; r++) {
                lanes values[MAX_TILES];
                for (int64_t t = 0; t < width; t++) values[t] = sums[r * width + t] + offset[t];
                memcpy(a->out + (row + r) * a->stride + tile * LANES, values, count * sizeof *a->out);
            }
        }
    }
    return 0;
}

KERNEL(pack_plain, tile) {
    int64_t outputs = a->outputs, columns = a->columns;
    if (tile < 0) return (outputs + LANES - 1) / LANES;
    bfloat16 *to = (bfloat16 *)a->matrix + tile * LANES * columns;
    memset(to, 0, LANES * columns * sizeof *to);
    for (int64_t lane = 0; lane < LANES && tile * LANES + lane < outputs; lane++)
        for (int64_t k = 0; k < columns; k += 2)
            memcpy(to + k * LANES + 2 * lane, a->weights + (tile * LANES + lane) * columns + k, 4);
    return 0;
}

KERNEL(narrow, item) {
    const float *x = a->x + item * a->columns;
    bfloat16 *out = a->out + item * a->columns;
    if (item < 0) return a->rows;
    for (int64_t i = 0; i < a->columns; i += LANES) store_rounded(out + i, load(x + i));
    return 0;
}

KERNEL(embed_plain, item) {
    int64_t columns = a->columns;
    if (item < 0) return a->count;
    int64_t token = a->tokens[item] - a->first;
    if (token < 0 || token >= a->outputs) {
        memset(a->out + item * columns, 0, columns * sizeof *a->out);
        return 0;
    }
    const bfloat16 *row = (const bfloat16 *)a->matrix + token / LANES * LANES * columns + token % LANES * 2;
    float *out = a->out + item * columns;
    for (int64_t k = 0; k < columns; k++) {
        uint32_t wide = (uint32_t)row[k / 2 * 2 * LANES + k % 2] << 16;
        memcpy(out + k, &wide, sizeof wide);
        out[k] *= a->factor;
    }
    return 0;
}
