/* Matrix products with weights that are not quantised: bfloat16, in tiles of 16 rows of which each lane takes two
 * columns at once, [columns / 2, 16, 2]. As with quantised weights, a row of x always goes through the same operations.
 */
#include "slices.h"
#include "tape.h"

#define MAX_ROWS 6

/* out [rows, 16], from `lane` on = x [rows, columns] times a slice of one tile. */
INLINE void multiply_slice(const uint16_t *tile, const uint16_t *x, int64_t columns, lanes *out, int64_t lane,
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

INLINE void multiply_tile(const uint16_t *tile, const uint16_t *x, int64_t columns, lanes *out, const int rows) {
    for (int64_t lane = 0; lane < LANES; lane += SLICE) multiply_slice(tile, x, columns, out, lane, rows);
}

#define ROWS(COUNT) \
    case COUNT: multiply_tile(tile, x, columns, out, COUNT); return;

static void multiply_any(const uint16_t *tile, const uint16_t *x, int64_t columns, lanes *out, int64_t rows) {
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
}

/* x bfloat16 [rows, columns], tiles, out float32 [rows, stride], bias float32 [outputs] or null. */
int64_t multiply_plain(const int64_t *a, int64_t item) {
    const uint16_t *x = (const uint16_t *)a[0], *weights = (const uint16_t *)a[1];
    float *out = (float *)a[2];
    const float *bias = (const float *)a[3];
    int64_t rows = a[4], columns = a[5], outputs = a[6], stride = a[7], tiles = (outputs + LANES - 1) / LANES;
    int64_t even_share = tiles / (8 * threads()), enough = 24576 / (columns * 32) / rows + 1;
    int64_t share = even_share < 1 ? 1 : even_share < enough ? even_share : enough;
    if (item < 0) return (tiles + share - 1) / share;
    for (int64_t tile = item * share; tile < tiles && tile < (item + 1) * share; tile++) {
        int64_t count = outputs - tile * LANES < LANES ? outputs - tile * LANES : LANES;
        lanes offset = {0}, sums[MAX_ROWS];
        if (bias) memcpy(&offset, bias + tile * LANES, count * sizeof *bias);
        for (int64_t row = 0; row < rows; row += MAX_ROWS) {
            int64_t together = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
            multiply_any(weights + tile * LANES * columns, x + row * columns, columns, sums, together);
            for (int64_t r = 0; r < together; r++) {
                lanes value = sums[r] + offset;
                memcpy(out + (row + r) * stride + tile * LANES, &value, count * sizeof *out);
            }
        }
    }
    return 0;
}

/* weights bfloat16 [outputs, columns] -> tiles; rows beyond the last are nought. */
int64_t pack_plain(const int64_t *a, int64_t tile) {
    const uint16_t *from = (const uint16_t *)a[0];
    int64_t outputs = a[2], columns = a[3];
    if (tile < 0) return (outputs + LANES - 1) / LANES;
    uint16_t *to = (uint16_t *)a[1] + tile * LANES * columns;
    memset(to, 0, LANES * columns * sizeof *to);
    for (int64_t lane = 0; lane < LANES && tile * LANES + lane < outputs; lane++)
        for (int64_t k = 0; k < columns; k += 2)
            memcpy(to + k * LANES + 2 * lane, from + (tile * LANES + lane) * columns + k, 4);
    return 0;
}

/* x float32 [rows, columns] -> bfloat16. */
int64_t narrow(const int64_t *a, int64_t item) {
    const float *x = (const float *)a[0] + item * a[3];
    uint16_t *out = (uint16_t *)a[1] + item * a[3];
    int64_t rows = a[2], columns = a[3];
    if (item < 0) return rows;
    for (int64_t i = 0; i < columns; i += LANES) store_rounded(out + i, load(x + i));
    return 0;
}

/* Rows `tokens` int32 [count] of a packed matrix -> float32 [count, columns]. */
int64_t embed_plain(const int64_t *a, int64_t item) {
    const int32_t *tokens = (const int32_t *)a[0];
    int64_t count = a[3], columns = a[4];
    if (item < 0) return count;
    const uint16_t *row = (const uint16_t *)a[1] + tokens[item] / LANES * LANES * columns + tokens[item] % LANES * 2;
    float *out = (float *)a[2] + item * columns, factor;
    memcpy(&factor, a + 5, sizeof factor);
    for (int64_t k = 0; k < columns; k++) {
        uint32_t wide = (uint32_t)row[k / 2 * 2 * LANES + k % 2] << 16;
        memcpy(out + k, &wide, sizeof wide);
        out[k] *= factor;
    }
    return 0;
}
