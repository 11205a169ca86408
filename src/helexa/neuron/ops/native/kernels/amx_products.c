/* Products of many rows with AMX (see amx.h). One instruction multiplies the codes of up to AMX_ROWS rows and one group
 * of a tile. Sums of integers are exact, and the floating-point operations are those of `multiply_slices`. The results
 * are therefore the same as without AMX.
 *
 * The weights of two tiles are expanded to signed bytes, for some groups at once, and multiplied by all panels. */
#include "blocks.h"
#include "graph.h"

#if AMX
#define PAIR 2       /* tiles that share the loads of activations */
#define SUM_TILES 4  /* sums [AMX_ROWS, LANES] of a tile that are computed at once; they stay in the L1 cache */
#define MOST_SINGLE_ROWS 8 /* maximum rows whose upper bytes are multiplied one row after another */
#define GROUP_CODES (QUADS * 4 * LANES)

/* Some groups of a pair of tiles: codes as signed bytes, and scales and minimums of each half as float32. */
typedef struct {
    uint8_t codes[PAIR][SUM_TILES][GROUP_CODES] __attribute__((aligned(64)));
    slice scale[SUM_TILES][PAIR][2], minimum[SUM_TILES][PAIR][2];
} expanded;

typedef int32_t sums_of_rows[AMX_ROWS][LANES];

/* Sums of products: `all` of lower bytes, to which 256 times the sums of upper bytes are added; `upper` of upper
 * bytes. */
typedef struct {
    sums_of_rows all[PAIR][SUM_TILES], upper[PAIR];
} work __attribute__((aligned(64)));

/* Expand `count` groups from `first` on of the tile `tile` to tile `t` of a pair. Prefetch the weights that are `ahead`
 * bytes after the read ones, unless `ahead` is 0. */
INLINE void expand_tile(const format f, const uint8_t *matrix, const uint8_t *tile, int64_t first, int64_t count,
                        int64_t ahead, expanded *to, int64_t t) {
    slice_bits table = f.table ? load_table(matrix) : (slice_bits){0};
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *from = codes_of(f, tile, first + i), *later = tile + ahead + (first + i) * group_bytes(f);
        for (int64_t line = 0; ahead && line < group_bytes(f); line += 64) prefetch_weights(later + line);
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++) {
            __m512i codes = (__m512i)quad_codes(f, from, q);
            if (f.table) codes = (__m512i)look_up(table, (slice_bits)codes);
            if (f.zero == 128) codes = _mm512_xor_si512(codes, _mm512_set1_epi8(-128));
            else if (f.zero) codes = _mm512_sub_epi8(codes, _mm512_set1_epi8((char)f.zero));
            _mm512_store_si512(to->codes[t][i] + 64 * q, codes);
        }
        unpack_scales(f, tile, first + i, 0, to->scale[i][t], to->minimum[i][t]);
    }
}

#define EXPAND(NUMBER) \
    static __attribute__((noinline)) void expand_##NUMBER(const uint8_t *matrix, const uint8_t *tile, int64_t first, \
                                                          int64_t count, int64_t ahead, expanded *to, int64_t t) { \
        expand_tile(FORMATS[NUMBER], matrix, tile, first, count, ahead, to, t); \
    }
#define OF_CODES(NUMBER) [NUMBER] = expand_##NUMBER,
EACH_FORMAT_OF_CODES(EXPAND)
static void (*const EXPAND_TILE[FORMAT_COUNT])(const uint8_t *, const uint8_t *, int64_t, int64_t, int64_t, expanded *,
                                               int64_t) = {EACH_FORMAT_OF_CODES(OF_CODES)};

/* Add 256 times the products of the upper bytes of group `i` to its sums. `chosen` has a bit for each row
 * with upper bytes that differ from 0. */
INLINE void add_upper(const uint8_t *x, const expanded *weights, int64_t i, int64_t rows, uint32_t chosen, work *to,
                      const int halves) {
    const int64_t offset = i % halves * (GROUP_CODES / 2);
    const uint8_t *codes[PAIR] = {weights->codes[0][i / halves] + offset, weights->codes[1][i / halves] + offset};
    const uint8_t *upper = x + GROUP * rows + i % halves * (GROUP / 2);
    if (__builtin_popcount(chosen) > MOST_SINGLE_ROWS) {
        _tile_loadd(7, upper, GROUP);
        _tile_loadd(4, codes[0], 4 * LANES);
        _tile_loadd(5, codes[1], 4 * LANES);
        _tile_zero(2);
        _tile_dpbssd(2, 7, 4);
        _tile_zero(3);
        _tile_dpbssd(3, 7, 5);
        _tile_stored(2, to->upper[0], 4 * LANES);
        _tile_stored(3, to->upper[1], 4 * LANES);
        for (int t = 0; t < PAIR; t++)
            for (int64_t r = 0; r < rows; r++) {
                __m512i more = _mm512_slli_epi32(_mm512_load_si512(to->upper[t][r]), 8);
                _mm512_store_si512(to->all[t][i][r], _mm512_add_epi32(_mm512_load_si512(to->all[t][i][r]), more));
            }
        return;
    }
    const __m512i sign = _mm512_set1_epi8(-128);
    for (; chosen; chosen &= chosen - 1) {
        const int r = __builtin_ctz(chosen);
        uint32_t quads = (uint32_t)arrays_of(x, rows).upper[r] >> i % halves * (QUADS / 2);
        quads &= (1u << QUADS / halves) - 1;
        __m512i sums[PAIR] = {_mm512_setzero_si512(), _mm512_setzero_si512()}, offsets = _mm512_setzero_si512();
        for (; quads; quads &= quads - 1) {
            const int q = __builtin_ctz(quads);
            int32_t four;
            memcpy(&four, upper + r * GROUP + 4 * q, sizeof four);
            __m512i same = _mm512_set1_epi32(four);
            for (int t = 0; t < PAIR; t++) { /* the instruction takes unsigned codes: 128 more than the signed codes */
                __m512i code = _mm512_xor_si512(_mm512_load_si512(codes[t] + 64 * q), sign);
                sums[t] = _mm512_dpbusd_epi32(sums[t], code, same);
            }
            offsets = _mm512_dpbusd_epi32(offsets, sign, same);
        }
        for (int t = 0; t < PAIR; t++) {
            __m512i more = _mm512_slli_epi32(_mm512_sub_epi32(sums[t], offsets), 8);
            _mm512_store_si512(to->all[t][i][r], _mm512_add_epi32(_mm512_load_si512(to->all[t][i][r]), more));
        }
    }
}

/* Compute the sums of products of the codes of `rows` rows and `count` expanded groups. */
INLINE void multiply_codes(const uint8_t *panel, const expanded *weights, int64_t count, int64_t rows, work *to,
                           const int halves) {
    const __mmask16 each_row = (__mmask16)((1 << rows) - 1);
    const __m512i of_half = _mm512_set1_epi32((1 << QUADS / halves) - 1);
    uint32_t chosen[SUM_TILES], any = 0; /* a bit for each row with upper bytes that differ from 0 */
    const int64_t units = count * halves;
    __asm__ volatile("" : : : "memory"); /* GCC does not know that the loads of registers read the expanded codes */
/* A store of a register stops the processor until the sums in the register are computed. Each step therefore stores the
 * sums of the previous group (or half of a group). */
#define MULTIPLY(I, FIRST, SECOND, BEFORE_FIRST, BEFORE_SECOND) \
    if (I < units) { \
        const int64_t g = (I) / halves, offset = (I) % halves * (GROUP_CODES / 2); \
        const uint8_t *x = panel + g * BLOCK_BYTES * rows; \
        _tile_loadd(6, x + (I) % halves * (GROUP / 2), GROUP); \
        _tile_loadd(4, weights->codes[0][g] + offset, 4 * LANES); \
        _tile_loadd(5, weights->codes[1][g] + offset, 4 * LANES); \
        _tile_zero(FIRST); \
        _tile_dpbssd(FIRST, 6, 4); \
        if (I) _tile_stored(BEFORE_FIRST, to->all[0][I - 1], 4 * LANES); \
        _tile_zero(SECOND); \
        _tile_dpbssd(SECOND, 6, 5); \
        if (I) _tile_stored(BEFORE_SECOND, to->all[1][I - 1], 4 * LANES); \
        __m512i upper = _mm512_maskz_loadu_epi32(each_row, arrays_of(x, rows).upper); \
        if ((I) % halves) upper = _mm512_srli_epi32(upper, QUADS / 2); \
        any |= chosen[I] = _mm512_test_epi32_mask(upper, of_half); \
    }
#pragma GCC unroll 1
    for (int64_t i = 0; i < units; i += 2) {
        MULTIPLY(i, 0, 1, 2, 3)
        MULTIPLY(i + 1, 2, 3, 0, 1)
    }
    if (units % 2) {
        _tile_stored(0, to->all[0][units - 1], 4 * LANES);
        _tile_stored(1, to->all[1][units - 1], 4 * LANES);
    } else {
        _tile_stored(2, to->all[0][units - 1], 4 * LANES);
        _tile_stored(3, to->all[1][units - 1], 4 * LANES);
    }
    for (int64_t i = 0; any && i < units; i++)
        if (chosen[i]) add_upper(panel + i / halves * BLOCK_BYTES * rows, weights, i, rows, chosen[i], to, halves);
}

/* Multiply the sums of `count` rows from `row` on by the scales, and add the results to `to` [rows, PAIR]. */
INLINE void add_scaled_sums(const uint8_t *panel, const expanded *weights, int64_t groups, int64_t panel_rows,
                            int64_t row, const work *from, lanes *to, const int halves, const int minimum,
                            const int count) {
    slice acc[8 * PAIR];
    for (int i = 0; i < count * PAIR; i++) acc[i] = (slice)to[i];
    for (int64_t g = 0; g < groups; g++, panel += BLOCK_BYTES * panel_rows) {
        const arrays x = arrays_of(panel, panel_rows);
        const slice(*scale)[2] = weights->scale[g], (*least)[2] = weights->minimum[g];
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            slice unit = fill(x.scale[row + r]);
#pragma GCC unroll 2
            for (int t = 0; t < PAIR; t++) {
                slice *sum = acc + r * PAIR + t;
#define SUMS(HALF) __builtin_convertvector((slice_words)slice_load(from->all[t][g * halves + HALF][row + r]), slice)
                slice product = SUMS(0) * scale[t][0];
                if (halves == 2) product = slice_fused(SUMS(1), scale[t][1], product);
                *sum = slice_fused(product, unit, *sum);
                if (minimum && halves == 1) *sum = slice_fused(least[t][0], fill(x.scaled_sum[row + r]), *sum);
                if (minimum && halves == 2) {
                    slice shift = least[t][0] * (float)x.first[row + r];
                    shift = slice_fused(least[t][1], fill((float)x.second[row + r]), shift);
                    *sum = slice_fused(shift, unit * -0x1p-5f, *sum);
                }
            }
        }
    }
    for (int i = 0; i < count * PAIR; i++) to[i] = (lanes)acc[i];
}

/* Add the products of a panel and `count` expanded groups to `to` [rows, PAIR]. */
INLINE void add_products(const uint8_t *panel, const expanded *weights, int64_t count, int64_t rows, work *sums,
                         lanes *to, const int halves, const int minimum) {
    multiply_codes(panel, weights, count, rows, sums, halves);
    int64_t row = 0;
#define ADD(COUNT) \
    for (; row + COUNT <= rows; row += COUNT) \
        add_scaled_sums(panel, weights, count, rows, row, sums, to + row * PAIR, halves, minimum, COUNT);
    ADD(8) ADD(4) ADD(2) ADD(1)
}

#define ADD_PRODUCTS(NAME, HALVES, MINIMUM) \
    static __attribute__((noinline)) void NAME(const uint8_t *panel, const expanded *weights, int64_t count, \
                                               int64_t rows, work *sums, lanes *to) { \
        add_products(panel, weights, count, rows, sums, to, HALVES, MINIMUM); \
    }
ADD_PRODUCTS(add_of_groups, 1, 0)
ADD_PRODUCTS(add_of_groups_with_minimum, 1, 1)
ADD_PRODUCTS(add_of_halves, 2, 0)
ADD_PRODUCTS(add_of_halves_with_minimum, 2, 1)

void multiply_with_amx(const multiply_arguments *a, int64_t begin, int64_t end, int64_t first, int64_t last) {
    const format f = FORMATS[a->number];
    int64_t groups = a->columns / GROUP, bytes = tile_bytes(f, a->columns), quads = QUADS / halves_of(f);
    int64_t panels = (end - begin + AMX_ROWS - 1) / AMX_ROWS, chunk = SUM_TILES / halves_of(f);
    const uint8_t *tiles = a->matrix + head_bytes(f);
    expanded weights;
    work codes;
    lanes sums[panels][AMX_ROWS * PAIR] __attribute__((aligned(64)));
    void (*const add)(const uint8_t *, const expanded *, int64_t, int64_t, work *, lanes *) =
        f.group == GROUP ? f.minimum ? add_of_groups_with_minimum : add_of_groups
                         : f.minimum ? add_of_halves_with_minimum : add_of_halves;
    int64_t sized = 0; /* number of rows for which the sizes of the registers are set */
    for (int64_t tile = first, width; tile < last; tile += width) {
        width = last - tile < PAIR ? 1 : PAIR;
        memset(sums, 0, sizeof sums);
        if (width == 1) memset(&weights, 0, sizeof weights); /* there is no second tile; its sums are ignored */
        for (int64_t g = 0, count; g < groups; g += count) {
            count = groups - g < chunk ? groups - g : chunk;
            for (int64_t t = 0; t < width; t++)
                EXPAND_TILE[a->number](a->matrix, tiles + (tile + t) * bytes, g, count, width * bytes, &weights, t);
            for (int64_t panel = 0; panel < panels; panel++) {
                int64_t row = begin + panel * AMX_ROWS, rows = end - row < AMX_ROWS ? end - row : AMX_ROWS;
                if (rows != sized) size_registers(sized = rows, quads);
                for (int64_t r = 0; g == 0 && r < rows; r++) /* prefetch the output while the products run */
                    for (int64_t t = 0; t < width; t++)
                        __builtin_prefetch(a->out + (row + r) * a->stride + (tile + t) * LANES, 1);
                add(amx_group(a->x, row, a->rows, groups, g), &weights, count, rows, &codes, sums[panel]);
            }
        }
        for (int64_t panel = 0; panel < panels; panel++) {
            int64_t row = begin + panel * AMX_ROWS, rows = end - row < AMX_ROWS ? end - row : AMX_ROWS;
            lanes one[AMX_ROWS];
            for (int64_t r = 0; width == 1 && r < rows; r++) one[r] = sums[panel][r * PAIR];
            put_sums(a, width == 1 ? one : sums[panel], row, rows, tile, width);
        }
    }
    _tile_release();
}
#endif
