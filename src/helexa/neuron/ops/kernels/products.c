/* Matrix products of activations with packed weights: `out[t, n] = sum over k of x[t, k] * w[n, k]`.
 *
 * Quantised weights keep their codes exactly; activations are rounded to 8 bits with one scale for each 32 columns, and
 * products of codes are summed in whole numbers. Weights lie in tiles (tiles.h): each lane takes four columns
 * of a row at once. A row of x goes through the same operations in the same order whatever rows are beside it.
 */
#include "lanes.h"
#include "tape.h"
#include "tiles.h"

#define MAX_ROWS 6   /* rows of x that are multiplied at once; their sums stay in registers */
#define MAX_TILES 2
#define CACHED 131072 /* bytes */
#define LEAST_ROWS 48

/* 32 activations of one row. */
typedef struct {
    float scale, scaled_sum; /* the sum is that of the rounded activations */
    int32_t first, second;   /* -32 times the sums of the codes of either half */
    int8_t codes[GROUP];
} block;

/* Quad `j` of a group. */
INLINE bits quad_codes(const format f, const uint8_t *from, const int j) {
    if (f.bits == 8) return load_bits(from + 64 * j);
    bits both = load_bits(from + 64 * (j % 4));
    bits codes = (j < 4 ? both : both >> 4) & 0x0f0f0f0fu;
    if (f.bits == 5) {
        bits plane = load_bits(from + 256);
        codes |= (j <= 4 ? plane << (4 - j) : plane >> (j - 4)) & 0x10101010u;
    }
    if (f.bits == 6) {
        bits plane = load_bits(from + 256 + 64 * (j / 4));
        codes |= (j % 4 <= 2 ? plane << (4 - 2 * (j % 4)) : plane >> 2) & 0x30303030u;
    }
    return codes;
}

INLINE void unpack_scales(const format f, const uint8_t *tile, int64_t g, lanes *scale, lanes *other) {
    if (f.levels == 1) {
        const uint8_t *at = codes_of(f, tile, g) + code_bytes(f);
        *scale = load_half(at);
        *other = f.minimum ? load_half(at + 32) : *scale * (float)-f.zero;
        return;
    }
    const uint8_t *span = tile + g / SPAN * span_bytes(f), *at = span + 64;
    lanes unit = load_half(span);
    if (f.group == 16) {
        *scale = load_signed(at + g % SPAN * 32) * unit;
        *other = load_signed(at + g % SPAN * 32 + 16) * unit;
        return;
    }
    *scale = load_unsigned(at + g % SPAN * 16) * unit;
    *other = load_unsigned(at + SPAN * 16 + g % SPAN * 16) * load_half(span + 32);
}

INLINE int32_t quad_of(const block *x, int j) {
    int32_t quad;
    memcpy(&quad, x->codes + 4 * j, sizeof quad);
    return quad;
}

/* Adds the product of `count` quads from `j` on; `dots` are [rows, tiles]. */
INLINE void add_quads(const format f, const uint8_t *const *from, const block *x, words *dots, const int j, const int count,
                      const int rows, const int tiles) {
#pragma GCC unroll 8
    for (int q = j; q < j + count; q++) {
        bits codes[MAX_TILES];
#pragma GCC unroll 2
        for (int t = 0; t < tiles; t++) codes[t] = quad_codes(f, from[t], q);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            int32_t quad = quad_of(x + r, q);
#pragma GCC unroll 2
            for (int t = 0; t < tiles; t++) dots[r * tiles + t] = dot4(dots[r * tiles + t], codes[t], quad, f.bits == 8);
        }
    }
}

/* `rows` rows of x, of which `stride` are interleaved, times `tiles` tiles that lie `distance` bytes apart; sums are
 * [rows, tiles]. */
INLINE void multiply_tiles(const format f, const uint8_t *tile, int64_t distance, const block *x, int64_t groups,
                           int64_t stride, lanes *sums, const int rows, const int tiles, int64_t ahead) {
    lanes acc[MAX_ROWS * MAX_TILES];
    for (int i = 0; i < rows * tiles; i++) acc[i] = (lanes){0};
    for (int64_t g = 0; g < groups; g++, x += stride) {
        words dots[MAX_ROWS * MAX_TILES];
        lanes scale[MAX_TILES], other[MAX_TILES], products[MAX_ROWS * MAX_TILES];
        const uint8_t *from[MAX_TILES];
        for (int t = 0; t < tiles; t++) {
            from[t] = codes_of(f, tile + t * distance, g);
            unpack_scales(f, tile + t * distance, g, scale + t, other + t);
            if (ahead)
                for (int64_t line = 0; line < code_bytes(f) + scale_bytes(f); line += 64)
                    __builtin_prefetch(from[t] + ahead + line);
        }
        if (f.group == 32) {
#pragma GCC unroll 16
            for (int i = 0; i < rows * tiles; i++) dots[i] = (words){0};
            add_quads(f, from, x, dots, 0, QUADS, rows, tiles);
#pragma GCC unroll 16
            for (int i = 0; i < rows * tiles; i++) {
                lanes product = __builtin_convertvector(dots[i], lanes) * scale[i % tiles];
                acc[i] = fused(product, all(x[i / tiles].scale), acc[i]);
                acc[i] = fused(other[i % tiles], all(x[i / tiles].scaled_sum), acc[i]);
            }
            continue;
        }
#pragma GCC unroll 16
        for (int i = 0; i < rows * tiles; i++) dots[i] = (words){0} + x[i / tiles].first;
        add_quads(f, from, x, dots, 0, QUADS / 2, rows, tiles);
#pragma GCC unroll 16
        for (int i = 0; i < rows * tiles; i++) {
            products[i] = __builtin_convertvector(dots[i], lanes) * scale[i % tiles];
            dots[i] = (words){0} + x[i / tiles].second;
        }
        add_quads(f, from, x, dots, QUADS / 2, QUADS / 2, rows, tiles);
#pragma GCC unroll 16
        for (int i = 0; i < rows * tiles; i++) {
            lanes product = fused(__builtin_convertvector(dots[i], lanes), other[i % tiles], products[i]);
            acc[i] = fused(product, all(x[i / tiles].scale), acc[i]);
        }
    }
    for (int i = 0; i < rows * tiles; i++) sums[i] = acc[i];
}

/* Few rows are bound by memory, many by arithmetic: then two tiles share what is loaded of x. */
#define BY_ROWS(NUMBER) \
    case NUMBER: \
        if (rows == 1) multiply_tiles(FORMATS[NUMBER], tile, distance, x, groups, 1, sums, 1, 1, ahead); \
        else if (rows == 2) multiply_tiles(FORMATS[NUMBER], tile, distance, x, groups, 2, sums, 2, 1, ahead); \
        else if (rows <= 4) multiply_tiles(FORMATS[NUMBER], tile, distance, x, groups, rows, sums, 4, 1, ahead); \
        else if (tiles == 1) multiply_tiles(FORMATS[NUMBER], tile, distance, x, groups, rows, sums, MAX_ROWS, 1, ahead); \
        else multiply_tiles(FORMATS[NUMBER], tile, distance, x, groups, rows, sums, MAX_ROWS, 2, ahead); \
        return;

/* Up to MAX_ROWS rows. What lies behind the last of them may be multiplied, too, for nothing. */
static void multiply_any(int64_t number, const uint8_t *tile, int64_t distance, const block *x, int64_t groups, lanes *sums,
                         int64_t rows, int64_t tiles, int64_t ahead) {
    switch (number) { EACH_FORMAT(BY_ROWS) }
}

INLINE void put(float *out, lanes value, int64_t count) {
    if (count == LANES)
        store(out, value);
    else
        memcpy(out, &value, count * sizeof *out);
}

/* Rows that go through a tile before the next: few enough that their blocks stay in the second cache and that threads end
 * together, many enough that a tile is not fetched too often. */
static int64_t rows_per_item(int64_t groups) {
    int64_t rows = CACHED / (groups * (int64_t)sizeof(block));
    return (rows < LEAST_ROWS ? LEAST_ROWS : rows) / MAX_ROWS * MAX_ROWS;
}

/* Tiles that one item takes: enough work to be worth asking for, few enough to share out evenly. */
static int64_t tiles_per_item(int64_t tiles, int64_t bytes, int64_t rows) {
    int64_t enough = 24576 / bytes / rows + MAX_TILES, even = tiles / (8 * threads());
    return even < 1 ? 1 : even < enough ? even : enough;
}

/* x: blocks (and MAX_ROWS more behind them), weights: tiles, out: float32 [rows, stride], bias: float32 [outputs] or null. */
int64_t multiply(const int64_t *a, int64_t item) {
    const block *x = (const block *)a[0];
    const uint8_t *weights = (const uint8_t *)a[1];
    float *out = (float *)a[2];
    const float *bias = (const float *)a[3];
    int64_t rows = a[4], groups = a[5] / GROUP, outputs = a[6], stride = a[7], number = a[8];
    int64_t tiles = (outputs + LANES - 1) / LANES, bytes = tile_bytes(FORMATS[number], a[5]);
    int64_t share = tiles_per_item(tiles, bytes, rows), shares = (tiles + share - 1) / share, panel = rows_per_item(groups);
    if (item < 0) return shares * ((rows + panel - 1) / panel);

    int64_t first = item % shares * share, last = first + share < tiles ? first + share : tiles;
    int64_t begin = item / shares * panel, end = begin + panel < rows ? begin + panel : rows;
    for (int64_t row = begin; row < end; row += MAX_ROWS) {
        int64_t together = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
        int64_t pair = together > MAX_ROWS - 2 ? MAX_TILES : 1;
        for (int64_t tile = first, width; tile < last; tile += width) {
            lanes sums[MAX_ROWS * MAX_TILES];
            width = last - tile < pair ? 1 : pair;
            for (int64_t r = 0; r < together; r++) /* by the time there is something to write, it can be written */
                for (int64_t t = 0; t < width; t++)
                    __builtin_prefetch(out + (row + r) * stride + (tile + t) * LANES, 1);
            multiply_any(number, weights + tile * bytes, bytes, x + row * groups, groups, sums, together, width,
                         row == begin && width > 1 ? width * bytes : 0); /* a single stream the processor sees itself */
            for (int64_t t = 0; t < width; t++) {
                int64_t at = (tile + t) * LANES, count = outputs - at < LANES ? outputs - at : LANES;
                lanes offset = {0};
                if (bias) memcpy(&offset, bias + at, count * sizeof *bias);
                for (int64_t r = 0; r < together; r++) put(out + (row + r) * stride + at, sums[r * width + t] + offset, count);
            }
        }
    }
    return 0;
}

INLINE void round_group(block *to, lanes low, lanes high) {
    lanes size = larger((lanes)((bits)low & 0x7fffffff), (lanes)((bits)high & 0x7fffffff));
    float peak = largest(size), inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
    /* Adding 1.5 * 2^23 rounds to a whole number, which the low bits then hold. */
    words first = (words)(low * inverse + 12582912.0f) - 0x4b400000;
    words second = (words)(high * inverse + 12582912.0f) - 0x4b400000;
    int32_t sums[2];
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to->codes, _mm512_cvtepi32_epi8((__m512i)first));
    _mm_storeu_si128((__m128i *)(to->codes + LANES), _mm512_cvtepi32_epi8((__m512i)second));
    sums[0] = _mm512_reduce_add_epi32((__m512i)first), sums[1] = _mm512_reduce_add_epi32((__m512i)second);
#else
    sums[0] = sums[1] = 0;
    for (int i = 0; i < LANES; i++) {
        to->codes[i] = (int8_t)first[i], to->codes[LANES + i] = (int8_t)second[i];
        sums[0] += first[i], sums[1] += second[i];
    }
#endif
    to->scale = peak / 127.0f;
    to->scaled_sum = to->scale * (float)(sums[0] + sums[1]);
    to->first = -32 * sums[0], to->second = -32 * sums[1];
}

/* x float32 [rows, columns] -> blocks, MAX_ROWS rows interleaved. If `gated`, x is [rows, 2 * columns], and what is rounded
 * is silu(first half) * second half. */
int64_t quantise(const int64_t *a, int64_t item) {
    const float *x = (const float *)a[0];
    block *out = (block *)a[1];
    int64_t rows = a[2], columns = a[3], gated = a[4], groups = columns / GROUP;
    if (item < 0) return (rows + 3) / 4;
    for (int64_t row = item * 4; row < rows && row < item * 4 + 4; row++) {
        int64_t start = row / MAX_ROWS * MAX_ROWS, together = rows - start < MAX_ROWS ? rows - start : MAX_ROWS;
        block *to = out + start * groups + (row - start);
        const float *from = x + row * columns * (gated ? 2 : 1), *up = from + columns;
        if (gated)
            for (int64_t g = 0; g < groups; g++, to += together, from += GROUP, up += GROUP)
                round_group(to, silu(load(from)) * load(up), silu(load(from + LANES)) * load(up + LANES));
        else
            for (int64_t g = 0; g < groups; g++, to += together, from += GROUP)
                round_group(to, load(from), load(from + LANES));
    }
    return 0;
}

/* Bytes of a packed matrix, or 0 for what is none. */
int64_t packed_bytes(int64_t number, int64_t outputs, int64_t columns) {
    int64_t formats = sizeof FORMATS / sizeof *FORMATS;
    if (number < 0 || number >= formats || outputs < 1 || columns < 1 || outputs > 1 << 30 || columns > 1 << 30) return 0;
    if (columns % (FORMATS[number].levels == 2 ? SPAN * GROUP : GROUP)) return 0;
    return (outputs + LANES - 1) / LANES * tile_bytes(FORMATS[number], columns);
}

/* codes uint8 [outputs, columns]; units float16 [outputs, units]; scale codes 8 bits [outputs, columns / group] or null;
 * the same for minimums -> tiles. Rows beyond the last are nought. */
int64_t pack(const int64_t *a, int64_t tile) {
    const uint8_t *codes = (const uint8_t *)a[0];
    const uint16_t *unit = (const uint16_t *)a[1], *minimum_unit = (const uint16_t *)a[3];
    const uint8_t *scale = (const uint8_t *)a[2], *minimum = (const uint8_t *)a[4];
    int64_t outputs = a[6], columns = a[7], groups = columns / GROUP;
    const format f = FORMATS[a[8]];
    if (tile < 0) return (outputs + LANES - 1) / LANES;

    uint8_t *to = (uint8_t *)a[5] + tile * tile_bytes(f, columns);
    memset(to, 0, tile_bytes(f, columns));
    for (int64_t lane = 0; lane < LANES && tile * LANES + lane < outputs; lane++) {
        int64_t row = tile * LANES + lane;
        for (int64_t g = 0; g < groups; g++) {
            uint32_t quads[QUADS], plane;
            memcpy(quads, codes + row * columns + g * GROUP, sizeof quads);
            uint8_t *at = (uint8_t *)codes_of(f, to, g);
            uint32_t *word = (uint32_t *)at + lane;
            if (f.bits == 8) {
                for (int j = 0; j < QUADS; j++) word[j * LANES] = quads[j];
            } else {
                for (int j = 0; j < 4; j++) word[j * LANES] = (quads[j] & 0x0f0f0f0f) | (quads[j + 4] & 0x0f0f0f0f) << 4;
            }
            if (f.bits == 5) {
                plane = 0;
                for (int j = 0; j < QUADS; j++) plane |= ((quads[j] >> 4) & 0x01010101) << j;
                word[4 * LANES] = plane;
            }
            if (f.bits == 6)
                for (int half = 0; half < 2; half++) {
                    plane = 0;
                    for (int i = 0; i < 4; i++) plane |= ((quads[4 * half + i] >> 4) & 0x03030303) << (2 * i);
                    word[(4 + half) * LANES] = plane;
                }
            if (f.levels == 1) {
                memcpy(at + code_bytes(f) + 2 * lane, unit + row * groups + g, 2);
                if (f.minimum) memcpy(at + code_bytes(f) + 32 + 2 * lane, minimum_unit + row * groups + g, 2);
                continue;
            }
            uint8_t *span = to + g / SPAN * span_bytes(f);
            int64_t parts = GROUP / f.group, spans = groups / SPAN;
            memcpy(span + 2 * lane, unit + row * spans + g / SPAN, 2);
            for (int64_t part = 0; part < parts; part++)
                span[64 + (g % SPAN * parts + part) * 16 + lane] = scale[(row * groups + g) * parts + part];
            if (f.minimum) {
                memcpy(span + 32 + 2 * lane, minimum_unit + row * spans + g / SPAN, 2);
                span[64 + SPAN * 16 * parts + g % SPAN * 16 + lane] = minimum[row * groups + g];
            }
        }
    }
    return 0;
}

/* Rows `tokens` of a packed matrix -> float32 [count, columns]. */
int64_t embed(const int64_t *a, int64_t item) {
    const int64_t *tokens = (const int64_t *)a[0];
    int64_t count = a[3], columns = a[4];
    const format f = FORMATS[a[5]];
    if (item < 0) return count;
    const uint8_t *tile = (const uint8_t *)a[1] + tokens[item] / LANES * tile_bytes(f, columns);
    float *out = (float *)a[2] + item * columns;
    int lane = (int)(tokens[item] % LANES);
    for (int64_t g = 0; g < columns / GROUP; g++) {
        lanes scale, other;
        unpack_scales(f, tile, g, &scale, &other);
        for (int i = 0; i < GROUP; i++) {
            int code = (int)(quad_codes(f, codes_of(f, tile, g), i / 4)[lane] >> (i % 4 * 8) & 255);
            if (f.group == 16)
                out[g * GROUP + i] = (i < 16 ? scale : other)[lane] * (float)(code - f.zero);
            else if (f.minimum)
                out[g * GROUP + i] = scale[lane] * (float)code + other[lane];
            else
                out[g * GROUP + i] = scale[lane] * (float)(code - f.zero);
        }
    }
    return 0;
}
