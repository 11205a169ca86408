/* Products with matrices of codebook indexes, on processors that look up bytes in tables of 128 bytes (AVX-512 VBMI).
 *
 * The kernel looks up the numbers of each entry (see codebooks.h), which contain the codes of its columns, and expands
 * the numbers to quads. Quad 4 * h + k of a group has the columns 16 * h + 4 * p + k, p = 0 to 3, of all rows. A code
 * and a sign bit form the index into a table of signed values. These quads have other columns than the quads of other
 * formats, so the kernel reorders the activations in the same way. Sums of integers are exact, so the order does not
 * change results.
 *
 * Up to TOGETHER rows are multiplied directly from registers. For more rows, the quads of PANEL_GROUPS groups are
 * written to the L1 cache once, and multiplied by all rows. */
#include "blocks.h"
#include "codebooks.h"

#ifdef EXPANDS_IN_REGISTERS
#define MOST_LOOKUPS 4 /* maximum of `lookups_at_once` */
#define TOGETHER 8    /* rows multiplied at once; their sums stay in registers */
#define CHUNK 65536   /* bytes of reordered activations, which stay in the L2 cache */
#define PANEL_GROUPS (2 * STRETCH_GROUPS) /* groups of a tile that are expanded at once for more than TOGETHER rows */

/* A block with columns in the order of the quads. */
typedef struct {
    float scale;
    /* numbers to add to the sums of products of the first half, of the second half and of the whole group, because the
     * code 128 stands for the weight 0 */
    int32_t offsets[3];
    int32_t upper;
    quad codes[PARTS][QUADS];
} reordered;

static void reorder(const block *from, reordered *to) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
    __m256i lower = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)from->codes[0]), order);
    __m256i upper = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)from->codes[1]), order);
    _mm256_storeu_si256((__m256i *)to->codes[0], lower);
    _mm256_storeu_si256((__m256i *)to->codes[1], upper);
    to->scale = from->scale;
    to->offsets[0] = 128 / GROUP * from->first, to->offsets[1] = 128 / GROUP * from->second;
    to->offsets[2] = to->offsets[0] + to->offsets[1];
    to->upper = _mm256_test_epi32_mask(upper, upper);
}

/* Return the number of vectors of indexes that are looked up at once. A group has 8 / f.width vectors. The vectors
 * share the loads of the table, because the processor loads one vector per cycle. A table of 256 bytes takes only 4
 * loads, so 4 vectors at once are not faster than 2. */
INLINE int lookups_at_once(const format f) { return f.entries > 256 ? 4 : 2; }

/* Look up bytes of a table of `entries` bytes for `lookups` vectors of indexes. `low` has the lower 8 bits of the
 * indexes, and `planes` the others, `distance` planes per vector. */
INLINE void look_up_bytes(const uint8_t *table, const int entries, const __m512i *low, const uint64_t *planes,
                          const int distance, const int lookups, __m512i *found) {
    __m512i parts[MOST_LOOKUPS][4];
    const int count = entries / 256;
    __mmask64 bit[MOST_LOOKUPS];
#pragma GCC unroll 4
    for (int v = 0; v < lookups; v++) bit[v] = _mm512_movepi8_mask(low[v]);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
        const uint8_t *at = table + 256 * i;
        __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + 64);
        __m512i c = _mm512_loadu_si512(at + 128), d = _mm512_loadu_si512(at + 192);
        __asm__("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d)); /* otherwise, GCC loads them for each vector again */
#pragma GCC unroll 4
        for (int v = 0; v < lookups; v++) {
            __m512i first = _mm512_permutex2var_epi8(a, low[v], b), second = _mm512_permutex2var_epi8(c, low[v], d);
            parts[v][i] = _mm512_mask_blend_epi8(bit[v], first, second);
#pragma GCC unroll 2
            for (int p = 0; p < 2; p++) /* merge parts as soon as possible, so that few parts are in registers */
                if (((i + 1) & ((2 << p) - 1)) == 0) {
                    const int into = i + 1 - (2 << p);
                    __m512i upper = parts[v][into + (1 << p)];
                    parts[v][into] = _mm512_mask_blend_epi8(planes[v * distance + p], parts[v][into], upper);
                }
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < lookups; v++) found[v] = parts[v][0];
}

/* Return indexes of the tables: the bits `mask` of `numbers`, and the other bits of `signs`. */
INLINE __m512i with_signs(__m512i numbers, __m512i signs, const int mask) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)mask), numbers, signs, 0xca);
}

INLINE slice_bits values_at(__m512i table, __m512i indexes) {
    return (slice_bits)_mm512_permutexvar_epi8(indexes, table);
}

INLINE void load_tables(const uint8_t *matrix, __m512i *tables) {
    for (int k = 0; k < 4; k++) tables[k] = _mm512_loadu_si512(matrix + 64 + 64 * k);
}

/* Return the number of groups whose indexes are looked up at once. */
INLINE int64_t groups_at_once(const format f) { return is_shifted(f) ? 1 : lookups_at_once(f) * f.width / 8; }

/* The numbers of a group, and the bits that follow its indexes. `numbers[h]` is for half h of the columns. With four
 * codes per number, only `numbers[h][0]` is used. With two codes per number, `numbers[h][0]` has the first two columns
 * of each four, and `numbers[h][1]` has the other two. `signs` has one bit per shifted entry, or the sign bits. */
typedef struct {
    __m512i numbers[2][2], signs;
} group_numbers;

/* Look up the numbers of `groups_at_once` groups, whose indexes are `distance` bytes apart, or load the numbers of a
 * group that has no indexes. */
INLINE void look_up_numbers(const format f, const uint8_t *matrix, const uint8_t *from, int64_t distance,
                            group_numbers *to) {
    if (is_shifted(f)) {
        uint64_t plane;
        memcpy(&plane, from + 128, sizeof plane);
        to->signs = _mm512_movm_epi8(plane);
        for (int h = 0; h < 2; h++) to->numbers[h][0] = _mm512_loadu_si512(from + 64 * h);
        return;
    }
    const uint8_t *table = matrix + 64 + SIGNED_TABLES + f.entries * f.width;
    __asm__("" : "+r"(table)); /* the numbers stay in memory, because the quads need the registers */
    const int planes = more_bits(f), vectors = 8 / f.width, lookups = lookups_at_once(f), count = lookups / vectors;
    uint64_t upper[8] = {0};
    __m512i low[MOST_LOOKUPS], found[2][MOST_LOOKUPS];
#pragma GCC unroll 4
    for (int g = 0; g < count; g++) {
        const uint8_t *at = from + g * distance, *after = at + LANES * GROUP / f.width;
        memcpy(upper + g * planes * vectors, after, sizeof *upper * planes * vectors);
        to[g].signs = _mm512_loadu_si512(after + 8 * vectors * planes);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) low[g * vectors + v] = _mm512_loadu_si512(at + 64 * v);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++)
        look_up_bytes(table + half * f.entries, f.entries, low, upper, planes, lookups, found[half]);
    if (f.width == 4) {
#pragma GCC unroll 4
        for (int v = 0; v < lookups; v++)
            for (int half = 0; half < 2; half++) to[v / 2].numbers[v % 2][half] = found[half][v];
        return;
    }
    const __m512i rows = _mm512_set_epi32(60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
    const __m512i each = _mm512_mullo_epi32(rows, _mm512_set1_epi32(0x01010101)); /* index of each row's first byte */
    const __m512i first = _mm512_or_si512(each, _mm512_set1_epi32(0x41014000));
    const __m512i second = _mm512_or_si512(each, _mm512_set1_epi32(0x43034202));
#pragma GCC unroll 4
    for (int g = 0; g < count; g++) {
        to[g].numbers[0][0] = _mm512_permutex2var_epi8(found[0][g], first, found[1][g]);
        to[g].numbers[1][0] = _mm512_permutex2var_epi8(found[0][g], second, found[1][g]);
    }
}

/* Expand the numbers of a group to quads. `tables` has the tables from codes and signs to values. */
INLINE void expand_group(const format f, const __m512i *tables, const group_numbers *group, slice_bits *quads) {
    const __m512i signs = group->signs;
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m512i a = group->numbers[h][0], b, own = h ? _mm512_srli_epi16(signs, 2) : signs;
        slice_bits *to = quads + 4 * h;
        if (f.width == 8) {
            if (is_shifted(f)) {
                const __m512i row = _mm512_broadcast_i32x4(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
                const __m512i entry = _mm512_set1_epi32(h ? 0x03030202 : 0x01010000);
                own = _mm512_shuffle_epi8(signs, _mm512_or_si512(row, entry));
            }
            b = with_signs(_mm512_srli_epi16(a, 2), own, 0x3c), a = with_signs(a, own, 0x0f);
            to[0] = values_at(tables[0], a), to[1] = values_at(tables[1], a);
            to[2] = values_at(tables[2], b), to[3] = values_at(tables[3], b);
        } else {
            b = group->numbers[h][1];
            to[0] = values_at(tables[0], with_signs(a, own, 0x07));
            to[1] = values_at(tables[1], with_signs(a, own, 0x38));
            to[2] = values_at(tables[2], with_signs(b, own, 0x07));
            to[3] = values_at(tables[3], with_signs(b, own, 0x38));
        }
    }
}

/* dots [rows] = the products of `count` quads from `j` on, and the offsets. `stored` has all quads of the group if any
 * upper byte of the group differs from 0. */
INLINE void dot_quads(const slice_bits *quads, const uint8_t *stored, const reordered *x, slice_words *dots, const int j,
                      const int count, const int rows) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        uint32_t left = (uint32_t)x[r].upper & ((1u << count) - 1) << j;
        int32_t offset = x[r].offsets[count == QUADS ? 2 : j > 0];
        dots[r] = (slice_words)_mm512_set1_epi32(offset);
        if (__builtin_expect(left, 0)) {
            slice_words sum = {0};
#pragma GCC unroll 1
            for (; left; left &= left - 1) {
                int q = __builtin_ctz(left);
                sum = dot4(sum, slice_load(stored + 64 * q), x[r].codes[1], q);
            }
            dots[r] += sum << 8;
        }
    }
#pragma GCC unroll 8
    for (int q = j; q < j + count; q++)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) dots[r] = dot4(dots[r], quads[q], x[r].codes[0], q);
}

/* Add the products of `rows` rows and `groups` groups of a tile to `sums`. The quads are expanded, or read from
 * `expanded`. */
INLINE void multiply_groups(const format f, const uint8_t *matrix, const uint8_t *tile, const uint8_t *expanded,
                            const reordered *x, int64_t groups, lanes *sums, const int rows, int64_t ahead) {
    lanes acc[TOGETHER];
    __m512i tables[4];
    group_numbers numbers[MOST_LOOKUPS];
    const int64_t at_once = expanded ? 1 : groups_at_once(f);
    if (!expanded) load_tables(matrix, tables);
    for (int r = 0; r < rows; r++) acc[r] = sums[r];
    for (int64_t first = 0; first < groups; first += at_once) {
#pragma GCC unroll 4
        for (int64_t g = first; g < first + at_once; g++, x += rows) {
            slice_bits quads[QUADS];
            slice scale[2], minimum[2];
            slice_words dots[TOGETHER];
            const uint8_t *stored = expanded + g * EXPANDED_GROUP;
            uint8_t copy[EXPANDED_GROUP] __attribute__((aligned(64)));
            uint32_t upper = 0;
            for (int r = 0; r < rows; r++) upper |= (uint32_t)x[r].upper;
            if (expanded) {
                for (int q = 0; q < QUADS; q++) quads[q] = slice_load(stored + 64 * q);
            } else {
                const uint8_t *next = tile + ahead + g * group_bytes(f);
                for (int64_t line = 0; line < group_bytes(f); line += 64) prefetch_weights(next + line);
                if (g == first) look_up_numbers(f, matrix, codes_of(f, tile, g), code_bytes(f), numbers);
                expand_group(f, tables, numbers + (g - first), quads);
                stored = copy;
                if (__builtin_expect(upper, 0)) memcpy(copy, quads, sizeof copy);
            }
            unpack_scales(f, tile, g, 0, scale, minimum);
            if (f.group == GROUP) {
                dot_quads(quads, stored, x, dots, 0, QUADS, rows);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    acc[r] = slice_fused(__builtin_convertvector(dots[r], slice) * scale[0], fill(x[r].scale), acc[r]);
                continue;
            }
            slice products[TOGETHER];
            dot_quads(quads, stored, x, dots, 0, QUADS / 2, rows);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) products[r] = __builtin_convertvector(dots[r], slice) * scale[0];
            dot_quads(quads, stored, x, dots, QUADS / 2, QUADS / 2, rows);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                slice product = slice_fused(__builtin_convertvector(dots[r], slice), scale[1], products[r]);
                acc[r] = slice_fused(product, fill(x[r].scale), acc[r]);
            }
        }
    }
    for (int r = 0; r < rows; r++) sums[r] = acc[r];
}

/* The numbers of rows for which there is machine code. */
#define EACH_COUNT(DO, NUMBER) DO(NUMBER, 1) DO(NUMBER, 2) DO(NUMBER, 3) DO(NUMBER, 4) DO(NUMBER, 6) DO(NUMBER, 8)

INLINE int64_t padded(int64_t rows) { return rows + (rows > 4) * (rows & 1); }

#define MULTIPLY(NUMBER, ROWS) \
    if (rows == ROWS) multiply_groups(FORMATS[NUMBER], matrix, tile, NULL, x, groups, sums, ROWS, ahead);
#define CASE(NUMBER) \
    case NUMBER: EACH_COUNT(MULTIPLY, NUMBER) return;

static void multiply_few(int64_t number, const uint8_t *matrix, const uint8_t *tile, const reordered *x, int64_t groups,
                         lanes *sums, int64_t rows, int64_t ahead) {
    switch (number) { EACH_FORMAT_OF_INDEXES(CASE) }
}

#define MULTIPLY_EXPANDED(NUMBER, ROWS) \
    if (rows == ROWS) multiply_groups(FORMATS[NUMBER], NULL, tile, expanded, x, groups, sums, ROWS, 0);
#define EXPANDED_CASE(NUMBER) \
    case NUMBER: EACH_COUNT(MULTIPLY_EXPANDED, NUMBER) return;

static void multiply_expanded(int64_t number, const uint8_t *tile, const uint8_t *expanded, const reordered *x,
                              int64_t groups, lanes *sums, int64_t rows) {
    switch (number) { EACH_FORMAT_OF_INDEXES(EXPANDED_CASE) }
}

#define EXPAND(NUMBER) \
    static __attribute__((noinline)) void expand_quads_##NUMBER(const uint8_t *matrix, const uint8_t *tile, \
                                                                int64_t groups, uint8_t *to, int64_t ahead) { \
        __m512i tables[4]; \
        load_tables(matrix, tables); \
        group_numbers numbers[MOST_LOOKUPS]; \
        const int64_t at_once = groups_at_once(FORMATS[NUMBER]), bytes = group_bytes(FORMATS[NUMBER]); \
        for (int64_t g = 0; g < groups; g += at_once) { \
            const uint8_t *next = tile + ahead + g * bytes, *from = codes_of(FORMATS[NUMBER], tile, g); \
            for (int64_t line = 0; line < at_once * bytes; line += 64) prefetch_weights(next + line); \
            look_up_numbers(FORMATS[NUMBER], matrix, from, code_bytes(FORMATS[NUMBER]), numbers); \
            for (int64_t i = 0; i < at_once; i++) { \
                slice_bits quads[QUADS]; \
                expand_group(FORMATS[NUMBER], tables, numbers + i, quads); \
                memcpy(to + (g + i) * EXPANDED_GROUP, quads, sizeof quads); \
            } \
        } \
    }
EACH_FORMAT_OF_INDEXES(EXPAND)
#define EXPAND_CASE(NUMBER) \
    case NUMBER: expand_quads_##NUMBER(matrix, tile, groups, to, ahead); return;

static void expand_quads(int64_t number, const uint8_t *matrix, const uint8_t *tile, int64_t groups, uint8_t *to,
                         int64_t ahead) {
    switch (number) { EACH_FORMAT_OF_INDEXES(EXPAND_CASE) }
}

_Static_assert(CHUNK / sizeof(reordered) / ((MAX_INDEX_ROWS + 1 + TOGETHER) / TOGETHER * TOGETHER) >= STRETCH_GROUPS,
               "a chunk of the largest item has at least one stretch");

void multiply_indexes(const multiply_arguments *a, int64_t begin, int64_t end, int64_t first, int64_t last) {
    int64_t groups = a->columns / GROUP, number = a->number, rows = end - begin;
    int64_t few = rows <= (FORMATS[number].group == GROUP ? TOGETHER : TOGETHER - 2); /* halves need more registers */
    int64_t bytes = tile_bytes(FORMATS[number], a->columns), all = (rows + TOGETHER - 1) / TOGETHER * TOGETHER;
    int64_t chunk = CHUNK / (int64_t)sizeof(reordered) / all / STRETCH_GROUPS * STRETCH_GROUPS;
    if (!few && chunk > PANEL_GROUPS) chunk = PANEL_GROUPS;
    const uint8_t *weights = a->matrix + head_bytes(FORMATS[number]);
    uint8_t expanded[PANEL_GROUPS * EXPANDED_GROUP] __attribute__((aligned(64)));
    reordered x[CHUNK / sizeof(reordered)];
    lanes sums[last - first][all];
    memset(sums, 0, sizeof sums);
    for (int64_t g = 0, count; g < groups; g += count) {
        count = groups - g < chunk ? groups - g : chunk;
        for (int64_t part = 0; part < rows; part += TOGETHER) {
            int64_t here = rows - part < TOGETHER ? rows - part : TOGETHER, width = padded(here);
            for (int64_t r = 0; r < width; r++) {
                for (int64_t i = 0; i < count; i++) {
                    reordered *to = x + part * count + i * width + r;
                    const block from = stored_block(a->x, begin + part + (r < here ? r : 0), a->rows, groups, g + i);
                    if (r < here)
                        reorder(&from, to);
                    else
                        memset(to, 0, sizeof *to);
                }
            }
        }
        int64_t ahead = count == groups ? AHEAD : bytes;
        for (int64_t tile = first; tile < last; tile++) {
            const uint8_t *from = weights + tile * bytes + g / STRETCH_GROUPS * stretch_bytes(FORMATS[number]);
            if (few) {
                multiply_few(number, a->matrix, from, x, count, sums[tile - first], padded(rows), ahead);
                continue;
            }
            expand_quads(number, a->matrix, from, count, expanded, bytes);
            for (int64_t part = 0; part < rows; part += TOGETHER) {
                int64_t here = rows - part < TOGETHER ? rows - part : TOGETHER;
                lanes *to = sums[tile - first] + part;
                multiply_expanded(number, from, expanded, x + part * count, count, to, padded(here));
            }
        }
    }
    for (int64_t tile = first; tile < last; tile++) put_sums(a, sums[tile - first], begin, rows, tile, 1);
}
#endif
