/* Rounded activations: codes of 16 or 8 bits with one scale per 32 columns.
 *
 * A block has 32 rounded activations of one row. The rows of a product form panels of PANEL_ROWS rows, which are
 * multiplied at once; the blocks of a panel's rows are interleaved. */
#ifndef BLOCKS_H
#define BLOCKS_H

#include "tiles.h"

#define PANEL_ROWS 6 /* the sums of a panel's rows stay in registers */
/* Maximum rows of the last panel: with many registers, two more rows take less time than a panel of their own. */
#define MAX_ROWS (SLICE == LANES ? 8 : PANEL_ROWS)
#ifdef VNNI
#define PARTS 2 /* lower and upper bytes */
#else
#define PARTS 1
#endif

typedef struct {
    float scale, scaled_sum; /* `scaled_sum` is the sum of the rounded activations */
    int32_t first, second;   /* -32 times the sum of the codes of each half */
    int32_t upper;           /* bit j: an upper byte of quad j may differ from 0 */
    quad codes[PARTS][QUADS];
} block;
_Static_assert(sizeof(block) == BLOCK_BYTES && MAX_ROWS <= SPARE_BLOCKS, "as memory for activations is taken");

/* Return the number of panels of `rows` rows. */
INLINE int64_t panel_count(int64_t rows) {
    return rows < PANEL_ROWS ? 1 : (rows - (MAX_ROWS - PANEL_ROWS) + PANEL_ROWS - 1) / PANEL_ROWS;
}

/* Return the number of rows of the next panel, if `rest` rows are left. */
INLINE int64_t panel_rows(int64_t rest) { return rest > MAX_ROWS ? PANEL_ROWS : rest; }

/* Return the first row of the panel that has the row `row` of `rows` rows. */
INLINE int64_t panel_start(int64_t row, int64_t rows) {
    int64_t panel = row / PANEL_ROWS, last = panel_count(rows) - 1;
    return (panel < last ? panel : last) * PANEL_ROWS;
}

INLINE void put(float *out, lanes value, int64_t count) {
    if (count == LANES)
        store(out, value);
    else
        memcpy(out, &value, count * sizeof *out);
}

/* Write the sums [rows, tiles] of the rows from `row` on and the tiles from `tile` on. */
INLINE void put_sums(const multiply_arguments *a, const lanes *sums, int64_t row, int64_t rows, int64_t tile,
                     int64_t tiles) {
    for (int64_t t = 0; t < tiles; t++) {
        int64_t at = (tile + t) * LANES, count = a->outputs - at < LANES ? a->outputs - at : LANES;
        lanes offset = {0};
        if (a->bias) memcpy(&offset, a->bias + at, count * sizeof offset[0]);
        for (int64_t r = 0; r < rows; r++)
            put(a->out + (row + r) * a->stride + at, sums[r * tiles + t] + offset, count);
    }
}

#endif
