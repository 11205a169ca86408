/* Matrix products of activations with packed weights: `out[t, n] = sum over k of x[t, k] * w[n, k]`. An item multiplies
 * several panels of rounded activations by several tiles. */
#include "panel_products.h"
#include "graph.h"

#define CACHED 131072 /* bytes of activations per item, which stay in the L2 cache */
#define LEAST_ROWS 48 /* minimum rows per item */
/* Limits of an item with AMX: bytes of activations (most products read only half of them), and rows, whose sums stay in
 * the L1 cache. */
#define AMX_CACHED 393216
#define MOST_AMX_ROWS 96
/* Arguments of the functions that multiply the rows of a panel. These functions may also multiply blocks after the last
 * row. Callers ignore the results of these blocks. */
#define PANEL \
    const uint8_t *matrix, const uint8_t *tile, int64_t distance, const block *x, int64_t groups, lanes *sums, \
        int64_t rows, int64_t tiles, int64_t ahead
#define PANEL_FUNCTION static __attribute__((noinline)) void
typedef void multiply_panel(PANEL);

/* Define the function multiply_NAME_ROWSxSLICES. Each product has its own function: if GCC inlines several products
 * into one function, the products are slower and the compilation takes twice as long. */
#define PRODUCT(NAME, FORMAT, ROWS, SLICES) \
    PANEL_FUNCTION multiply_##NAME##_##ROWS##x##SLICES(PANEL) { \
        for (int64_t lane = 0; lane < LANES; lane += SLICE == LANES ? LANES : (SLICES) * SLICE) \
            multiply_slices(FORMAT, matrix, tile, SLICE == LANES ? distance : 0, x, groups, \
                            ROWS > 2 ? rows : ROWS, sums, ROWS, SLICES, ahead, lane); \
    }

/* Define the function multiply_NAME. Products of few rows are bound by memory. Products of many rows are bound by
 * arithmetic: two tiles share the loads of x. */
#define PRODUCTS(NAME, FORMAT) \
    PRODUCT(NAME, FORMAT, 1, FEW_ROWS_SLICES) \
    PRODUCT(NAME, FORMAT, 2, FEW_ROWS_SLICES) \
    PRODUCT(NAME, FORMAT, 3, MANY_ROWS_SLICES) \
    PRODUCT(NAME, FORMAT, 4, MANY_ROWS_SLICES) \
    PRODUCT(NAME, FORMAT, PANEL_ROWS, MANY_ROWS_SLICES) \
    PRODUCT(NAME, FORMAT, PANEL_ROWS, MAX_TILES) \
    PRODUCT(NAME, FORMAT, MAX_ROWS, MANY_ROWS_SLICES) \
    static void multiply_##NAME(PANEL) { \
        multiply_panel *product = multiply_##NAME##_PANEL_ROWSxMANY_ROWS_SLICES; \
        if (MAX_TILES > 1 && tiles > 1) product = multiply_##NAME##_PANEL_ROWSxMAX_TILES; \
        if (MAX_ROWS > PANEL_ROWS && rows > PANEL_ROWS) product = multiply_##NAME##_MAX_ROWSxMANY_ROWS_SLICES; \
        if (rows <= 4) product = multiply_##NAME##_4xMANY_ROWS_SLICES; \
        if (rows == 3 && !MATRIX_PRODUCTS) product = multiply_##NAME##_3xMANY_ROWS_SLICES; \
        if (rows == 2) product = multiply_##NAME##_2xFEW_ROWS_SLICES; \
        if (rows == 1) product = multiply_##NAME##_1xFEW_ROWS_SLICES; \
        product(matrix, tile, distance, x, groups, sums, rows, tiles, ahead); \
    }
#define PRODUCTS_OF_CODES(NUMBER) PRODUCTS(NUMBER, FORMATS[NUMBER])
#define OF_CODES(NUMBER) [NUMBER] = multiply_##NUMBER,

EACH_FORMAT_OF_CODES(PRODUCTS_OF_CODES)
static multiply_panel *const MULTIPLY_PANEL[FORMAT_COUNT] = {EACH_FORMAT_OF_CODES(OF_CODES)};

#ifndef EXPANDS_IN_REGISTERS
/* Formats of expanded codes, by the number of scales per group. */
static const format EXPANDED[] = {
    {8, 2, 0, 128, GROUP, 1, FLOAT32, 1},
    {8, 2, 0, 128, GROUP / 2, 1, FLOAT32, 1},
};

PRODUCTS(expanded, EXPANDED[0])
PRODUCTS(expanded_halves, EXPANDED[1])
#endif

/* Return the number of tiles that are multiplied by a panel at once. */
INLINE int64_t panel_tiles(int64_t rows) { return rows > 4 && rows <= PANEL_ROWS ? MAX_TILES : 1; }

#if AMX
void multiply_with_amx(const multiply_arguments *a, int64_t begin, int64_t end, int64_t first, int64_t last);
#endif

/* Return the number of rows that one item multiplies: few enough for the L2 cache and an even load of the threads, and
 * many enough that each tile is loaded only a few times. */
static int64_t rows_per_item(int64_t groups, int amx) {
    int64_t cached = amx ? AMX_CACHED : CACHED, panel = amx ? AMX_ROWS : PANEL_ROWS;
    int64_t rows = cached / (groups * (int64_t)sizeof(block));
    if (amx && rows > MOST_AMX_ROWS) rows = MOST_AMX_ROWS;
    return (rows < LEAST_ROWS ? LEAST_ROWS : rows) / panel * panel;
}

/* Return the number of tiles per item: enough work to justify an item and to read weights ahead, but few enough for an
 * even load of the threads. */
static int64_t tiles_per_item(int64_t tiles, int64_t bytes, int64_t rows) {
    int64_t enough = 24576 / bytes / rows + 8 * MAX_TILES, even = tiles / (8 * threads());
    int64_t share = even < 1 ? 1 : even < enough ? even : enough;
    /* If two tiles share the loads of x, a single tile takes 1.4 times as long as half a pair. */
    return share > MAX_TILES ? share / MAX_TILES * MAX_TILES : share;
}

#ifndef EXPANDS_IN_REGISTERS
/* Multiply the rows from `begin` to `end` by the tiles from `first` to `last` of a format with a codebook. Each stretch
 * of one or two tiles is expanded once for all rows. */
void multiply_indexes(const multiply_arguments *a, int64_t begin, int64_t end, int64_t first, int64_t last) {
    const block *x = (const block *)a->x;
    int64_t groups = a->columns / GROUP, number = a->number, stretches = groups / STRETCH_GROUPS;
    int64_t bytes = tile_bytes(FORMATS[number], a->columns), step = bytes / stretches;
    int64_t panels = panel_count(end - begin), pair = end - begin > 4 ? MAX_TILES : 1;
    const uint8_t *weights = a->matrix + head_bytes(FORMATS[number]);
    uint8_t expanded[MAX_TILES * EXPANDED_STRETCH] __attribute__((aligned(64)));
    lanes sums[panels][MAX_TILES * MAX_ROWS];
    multiply_panel *const multiply_stretch =
        FORMATS[number].group == GROUP ? multiply_expanded : multiply_expanded_halves;
    for (int64_t tile = first, width; tile < last; tile += width) {
        width = last - tile < pair ? 1 : pair;
        memset(sums, 0, sizeof sums);
        for (int64_t stretch = 0; stretch < stretches; stretch++) {
            const uint8_t *from = weights + tile * bytes + stretch * step;
            for (int64_t t = 0; t < width; t++)
                expand(number, a->matrix, from + t * bytes, expanded + t * EXPANDED_STRETCH,
                       width > 1 ? width * bytes : AHEAD);
            for (int64_t panel = 0; panel < panels; panel++) {
                int64_t row = begin + panel * PANEL_ROWS, rows = panel_rows(end - row);
                int64_t together = panel_tiles(rows) > 1 ? width : 1;
                const block *blocks = x + row * groups + stretch * STRETCH_GROUPS * rows;
                for (int64_t t = 0; t < width; t += together)
                    multiply_stretch(expanded + t * EXPANDED_STRETCH, from + t * bytes, bytes, blocks, STRETCH_GROUPS,
                                     sums[panel] + t * MAX_ROWS, rows, together, 0);
            }
        }
        for (int64_t panel = 0; panel < panels; panel++) {
            int64_t row = begin + panel * PANEL_ROWS, rows = panel_rows(end - row);
            int64_t together = panel_tiles(rows) > 1 ? width : 1;
            for (int64_t t = 0; t < width; t += together)
                put_sums(a, sums[panel] + t * MAX_ROWS, row, rows, tile + t, together);
        }
    }
}
#endif

KERNEL(multiply, item) {
    const block *x = (const block *)a->x;
    int64_t rows = a->rows, groups = a->columns / GROUP, outputs = a->outputs, stride = a->stride, number = a->number;
    int64_t tiles = (outputs + LANES - 1) / LANES, bytes = tile_bytes(FORMATS[number], a->columns);
    const int amx = has_amx_panels(rows);
    int64_t share = tiles_per_item(tiles, bytes, rows), most = rows_per_item(groups, amx);
    if (amx && share < MAX_TILES) share = MAX_TILES;
    if (FORMATS[number].entries) limit_items(&share, &most, tiles);
    int64_t shares = (tiles + share - 1) / share, last_panel = panel_start(rows - 1, rows);
    if (item < 0) return shares * (last_panel / most + 1);

    const uint8_t *weights = a->matrix + head_bytes(FORMATS[number]);
    int64_t first = item % shares * share, last = first + share < tiles ? first + share : tiles;
    int64_t begin = item / shares * most, end = begin + most <= last_panel ? begin + most : rows;
    if (FORMATS[number].entries) {
        multiply_indexes(a, begin, end, first, last);
        return 0;
    }
#if AMX
    if (amx) {
        multiply_with_amx(a, begin, end, first, last);
        return 0;
    }
#endif
    multiply_panel *const multiply_rows = MULTIPLY_PANEL[number];
    for (int64_t row = begin, together; row < end; row += together) {
        together = panel_rows(end - row);
        int64_t pair = panel_tiles(together);
        for (int64_t tile = first, width; tile < last; tile += width) {
            lanes sums[MAX_ROWS * MAX_TILES];
            width = last - tile < pair ? 1 : pair;
            for (int64_t r = 0; r < together; r++) /* prefetch the output while the product runs */
                for (int64_t t = 0; t < width; t++)
                    __builtin_prefetch(a->out + (row + r) * stride + (tile + t) * LANES, 1);
            int64_t ahead = row > begin ? 0 : width > 1 ? width * bytes : AHEAD;
            multiply_rows(a->matrix, weights + tile * bytes, bytes, x + row * groups, groups, sums, together,
                         width, ahead);
            put_sums(a, sums, row, together, tile, width);
        }
    }
    return 0;
}
