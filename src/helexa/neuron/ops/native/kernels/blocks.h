/* Rounded activations: codes of 16 or 8 bits with one scale per 32 columns.
 *
 * A block has 32 rounded activations of one row. The rows of a product form panels of PANEL_ROWS rows, which are
 * multiplied at once; the blocks of a panel's rows are interleaved.
 *
 * For products with AMX, panels have up to AMX_ROWS rows, and the fields of the blocks of a panel and a group are
 * arrays over the rows: lower bytes of the codes [rows, GROUP], upper bytes [rows, GROUP], then [rows] each: `scale`,
 * `scaled_sum`, `first`, `second`, `upper`. */
#ifndef BLOCKS_H
#define BLOCKS_H

#include "amx.h"
#include "tiles.h"

#define AMX_ROWS 16       /* maximum rows of a panel of AMX */
#define LEAST_AMX_ROWS 32 /* minimum rows of a product for which AMX is faster */
#define PANEL_ROWS 6 /* the sums of a panel's rows stay in registers */
/* Maximum rows of the last panel. With many registers, two more rows in a panel take less time than a separate
 * panel. */
#define MAX_ROWS (SLICE == LANES ? 8 : PANEL_ROWS)
#ifdef VNNI
#define PARTS 2 /* lower and upper bytes */
#else
#define PARTS 1
#endif

/* LARGE(bits) marks a group in which the upper byte of a code may not fit in a signed number of 8 - `bits` bits,
 * because a magnitude before rounding is at least LARGE_CODE(bits). Products with weights of 5 or 6 bits are faster for
 * groups without this mark. */
#define LARGE(bits) (1 << (QUADS + (bits) - 5))
#define LARGE_CODE(bits) (((1 << (7 - (bits))) - 1) * 256 + 127.5f)

typedef struct {
    float scale, scaled_sum; /* `scaled_sum` is the sum of the rounded activations */
    int32_t first, second;   /* -32 times the sum of the codes of each half */
    int32_t upper;           /* bit j < QUADS: an upper byte of quad j may differ from 0; other bits: LARGE(bits) */
    quad codes[PARTS][QUADS];
} block;
_Static_assert(sizeof(block) == BLOCK_BYTES && MAX_ROWS <= SPARE_BLOCKS, "Python allocates activations by these sizes");

/* Return the number of panels of `rows` rows, without AMX. */
INLINE int64_t panel_count(int64_t rows) {
    return rows < PANEL_ROWS ? 1 : (rows - (MAX_ROWS - PANEL_ROWS) + PANEL_ROWS - 1) / PANEL_ROWS;
}

/* Return the number of rows of the next panel, if `rest` rows are left, without AMX. */
INLINE int64_t panel_rows(int64_t rest) { return rest > MAX_ROWS ? PANEL_ROWS : rest; }

/* Return whether a product of `rows` rows has panels of AMX. */
INLINE int has_amx_panels(int64_t rows) { return AMX && amx_allowed && rows >= LEAST_AMX_ROWS; }

/* Return the first row of the panel that has the row `row` of `rows` rows. */
INLINE int64_t panel_start(int64_t row, int64_t rows) {
    if (has_amx_panels(rows)) return row / AMX_ROWS * AMX_ROWS;
    int64_t panel = row / PANEL_ROWS, last = panel_count(rows) - 1;
    return (panel < last ? panel : last) * PANEL_ROWS;
}

/* Return the number of rows of the panel that starts at row `start` of `rows` rows. */
INLINE int64_t rows_of_panel(int64_t start, int64_t rows) {
    int64_t rest = rows - start;
    if (has_amx_panels(rows)) return rest < AMX_ROWS ? rest : AMX_ROWS;
    return panel_rows(rest);
}

/* The fields of the blocks of a group of a panel of AMX. */
typedef struct {
    const float *scale, *scaled_sum;
    const int32_t *first, *second, *upper;
} arrays;

INLINE arrays arrays_of(const uint8_t *group, int64_t rows) {
    const uint8_t *words = group + 2 * GROUP * rows;
    const int64_t step = 4 * rows;
    return (arrays){(const float *)words, (const float *)(words + step), (const int32_t *)(words + 2 * step),
                    (const int32_t *)(words + 3 * step), (const int32_t *)(words + 4 * step)};
}

/* Return the address of group `g` of the panel of AMX that starts at row `start` of x [rows, groups]. */
INLINE uint8_t *amx_group(const uint8_t *x, int64_t start, int64_t rows, int64_t groups, int64_t g) {
    return (uint8_t *)x + (start * groups + g * rows_of_panel(start, rows)) * BLOCK_BYTES;
}

/* Where the codes and the five other fields of a block are written. The fields are `step` bytes apart. */
typedef struct {
    quad *codes[PARTS];
    uint8_t *fields;
    int64_t step;
} place;

INLINE place place_of_block(block *to) {
    place result = {.fields = (uint8_t *)to, .step = 4};
    for (int part = 0; part < PARTS; part++) result.codes[part] = to->codes[part];
    return result;
}

/* Return the place of the row `r` in a group of a panel of AMX. */
INLINE place place_of_row(uint8_t *group, int64_t rows, int64_t r) {
    place result = {.fields = group + 2 * GROUP * rows + 4 * r, .step = 4 * rows};
    for (int part = 0; part < PARTS; part++) result.codes[part] = (quad *)(group + (part * rows + r) * GROUP);
    return result;
}

/* Return the place `bytes` bytes after `from`. */
INLINE place place_after(place from, int64_t bytes) {
    for (int part = 0; part < PARTS; part++) from.codes[part] = (quad *)((uint8_t *)from.codes[part] + bytes);
    from.fields += bytes;
    return from;
}

/* Return the block of the row `row` of `rows` rows and the group `g`. */
INLINE block stored_block(const uint8_t *x, int64_t row, int64_t rows, int64_t groups, int64_t g) {
    int64_t start = panel_start(row, rows), together = rows_of_panel(start, rows), r = row - start;
    if (!has_amx_panels(rows)) return ((const block *)x)[start * groups + g * together + r];
    place from = place_of_row(amx_group(x, start, rows, groups, g), together, r);
    block result;
    for (int part = 0; part < PARTS; part++) memcpy(result.codes[part], from.codes[part], sizeof *result.codes);
    for (int i = 0; i < 5; i++) memcpy((uint8_t *)&result + 4 * i, from.fields + i * from.step, 4);
    return result;
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
