/* Matrix products with bfloat16 weights. A tile of 16 weight rows has the layout [columns / 2, 16, 2]: each lane holds
 * two columns of a row at once. The operations on a row of x do not depend on other rows. */
#include "slices.h"
#include "graph.h"

#define MAX_ROWS 6

/* out [rows, 16] = x [rows, columns] times one tile, for the slice of lanes from `lane` on. */
INLINE void multiply_slice(const bfloat16 *tile, const bfloat16 *x, int64_t columns, lanes *out, int64_t lane,
                           const int rows) {
    slice even[MAX_ROWS], odd[MAX_ROWS];
    for (int r = 0; r < rows; r++) even[r] = odd[r] = (slice){0};
    tile += 2 * lane;
    for (int64_t k = 0; k < columns; k += 4, tile += 4 * LANES) {
        slice_bits first = slice_load(tile), second = slice_load(tile + 2 * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            uint32_t pairs[2];
            memcpy(pairs, x + r * columns + k, sizeof pairs);
            even[r] = slice_dot2(even[r], first, pairs[0]), odd[r] = slice_dot2(odd[r], second, pairs[1]);
        }
    }
    for (int r = 0; r < rows; r++) {
        slice total = even[r] + odd[r];
        memcpy((float *)(out + r) + lane, &total, sizeof total);
    }
}

INLINE void multiply_tile(const bfloat16 *tile, const bfloat16 *x, int64_t columns, lanes *out, const int rows) {
    for (int64_t lane = 0; lane < LANES; lane += SLICE) multiply_slice(tile, x, columns, out, lane, rows);
}

#define ROWS(COUNT) \
    case COUNT: multiply_tile(tile, x, columns, out, COUNT); return;

static void multiply_any(const bfloat16 *tile, const bfloat16 *x, int64_t columns, lanes *out, int64_t rows) {
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
}

KERNEL(multiply_plain, item) {
    const bfloat16 *weights = (const bfloat16 *)a->matrix;
    int64_t rows = a->rows, columns = a->columns, tiles = (a->outputs + LANES - 1) / LANES;
    int64_t even_share = tiles / (8 * threads()), enough = 24576 / (columns * 32) / rows + 1;
    int64_t share = even_share < 1 ? 1 : even_share < enough ? even_share : enough;
    if (item < 0) return (tiles + share - 1) / share;
    for (int64_t tile = item * share; tile < tiles && tile < (item + 1) * share; tile++) {
        int64_t rest = a->outputs - tile * LANES, count = rest < LANES ? rest : LANES;
        lanes offset = {0}, sums[MAX_ROWS];
        if (a->bias) memcpy(&offset, a->bias + tile * LANES, count * sizeof offset[0]);
        for (int64_t row = 0; row < rows; row += MAX_ROWS) {
            int64_t together = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            multiply_any(weights + tile * LANES * columns, a->x + row * columns, columns, sums, together);
            for (int64_t r = 0; r < together; r++) {
                lanes value = sums[r] + offset;
                memcpy(a->out + (row + r) * a->stride + tile * LANES, &value, count * sizeof *a->out);
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
