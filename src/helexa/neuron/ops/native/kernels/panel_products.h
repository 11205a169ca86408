/* Products of a panel of rounded activations (see blocks.h) with slices of tiles (see tiles.h).
 *
 * Products of codes are summed as integers. With VNNI, a code of 16 bits is 256 * upper + lower. The kernel first sums
 * products of the upper bytes, multiplies the sums by 256 and then adds products of the lower bytes. It skips quads
 * whose upper bytes are 0. Sums of integers are exact, so other rows do not change the result of a row. */
#ifndef PANEL_PRODUCTS_H
#define PANEL_PRODUCTS_H

#include "blocks.h"
#include "codebooks.h"

#ifdef VNNI
#define UNROLL_QUADS _Pragma("GCC unroll 8")
#else
#define UNROLL_QUADS _Pragma("GCC unroll 1") /* unrolled, GCC needs too many registers */
#endif
#define ALL_QUADS 255
#define MAX_SUMS (PANEL_ROWS * MAX_SLICES)

/* Return whether the format has codes that `expand` has written. */
INLINE int has_expanded_codes(const format f) { return f.entries && f.bits == 8; }

/* Return the codes of quad `q` in the form that `dot4` takes. */
INLINE slice_bits factors(const format f, const slice_bits table, const uint8_t *from, const int q) {
    slice_bits codes = quad_codes(f, from, q);
    if (f.table && !f.entries) return look_up(table, codes);
    return SIGNED_CODES && f.bits == 8 ? codes ^ 0x80808080u : codes;
}

/* Multiply quads by one part of x, the lower or the upper bytes, and add the products to `dots` [rows, slices]. Of the
 * `count` quads from `j` on, only quads with a bit in `chosen` are multiplied. Mostly, few rows have upper bytes in a
 * quad, so the loop skips the other rows. The processor predicts these branches, because they are the same for each
 * tile. With two scales per group, it mispredicts too many branches, so the loop skips no rows. */
INLINE void add_quads(const format f, const slice_bits table, const uint8_t *const *from, const block *x,
                      const int part, slice_words *dots, const int j, const int count, const int rows,
                      const int slices, const int32_t chosen) {
    UNROLL_QUADS
    for (int q = j; q < j + count; q++) {
        slice_bits codes[MAX_SLICES];
        if (!(chosen >> q & 1)) continue;
#pragma GCC unroll 4
        for (int t = 0; t < slices; t++) codes[t] = factors(f, table, from[t], q);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            if (part && rows > 1 && f.group == GROUP && !(x[r].upper >> q & 1)) continue;
#pragma GCC unroll 4
            for (int t = 0; t < slices; t++)
                dots[r * slices + t] = dot4(dots[r * slices + t], codes[t], x[r].codes[part], q);
        }
    }
}

#if SHIFTS_CODES
/* Return whether the products of both parts can be added at once (see `add_both_parts`). `upper` has the fields `upper`
 * of all rows. With 4 bits, this saves no time. */
INLINE int adds_both_parts(const format f, const int32_t upper) {
    return (f.bits == 5 || f.bits == 6) && !(upper & LARGE(f.bits));
}

/* Add to `dots` [rows, slices] the products of `count` quads from `j` on with both parts of x:
 * 256 * code * upper = (code << 8 - bits) * (upper << bits), and both factors fit a byte. */
INLINE void add_both_parts(const format f, const uint8_t *const *from, const block *x, slice_words *dots, const int j,
                           const int count, const int rows, const int slices, const int32_t chosen) {
    const uint32_t top = 0x01010101u * (uint8_t)(-1 << f.bits);
    UNROLL_QUADS
    for (int q = j; q < j + count; q++) {
        slice_bits codes[MAX_SLICES];
#pragma GCC unroll 4
        for (int t = 0; t < slices; t++) codes[t] = quad_codes(f, from[t], q);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int t = 0; t < slices; t++)
                dots[r * slices + t] = dot4(dots[r * slices + t], codes[t], x[r].codes[0], q);
        if (!(chosen >> q & 1)) continue;
#pragma GCC unroll 4
        for (int t = 0; t < slices; t++) codes[t] <<= 8 - f.bits;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            if (rows > 1 && !(x[r].upper >> q & 1)) continue;
            const quad upper = {(int32_t)((uint32_t)x[r].codes[1][q].bytes << f.bits & top)};
#pragma GCC unroll 4
            for (int t = 0; t < slices; t++) dots[r * slices + t] = dot4(dots[r * slices + t], codes[t], &upper, 0);
        }
    }
}
#endif

#if MATRIX_PRODUCTS
/* `add_quads` for an even number of rows. For each pair of rows and each slice, two vectors get the sums of both rows:
 * for the first two lanes of the slice, and for the other two lanes. */
INLINE void add_pairs(const format f, const slice_bits table, const uint8_t *const *from, const block *x,
                      const int part, slice_words *dots, const int j, const int count, const int rows,
                      const int slices, const int32_t chosen) {
    UNROLL_QUADS
    for (int q = j; q < j + count; q += 2) {
        slice_bits codes[MAX_SLICES][2];
        if (!(chosen >> q & 3)) continue;
#pragma GCC unroll 4
        for (int t = 0; t < slices; t++)
            join_quads(factors(f, table, from[t], q), factors(f, table, from[t], q + 1), codes[t]);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r += 2) {
            slice_bits quads = load_quads(x[r].codes[part] + q, x[r + 1].codes[part] + q);
#pragma GCC unroll 4
            for (int t = 0; t < slices; t++) {
                slice_words *first = dots + r * slices + t, *second = first + slices;
                *first = dot8(*first, codes[t][0], quads), *second = dot8(*second, codes[t][1], quads);
            }
        }
    }
}
#endif

/* dots [rows, slices] = the products of `count` quads from `j` on. */
INLINE void dot_quads(const format f, const slice_bits table, const uint8_t **from, const block *x,
                      slice_words *dots, const int j, const int count, const int rows, const int slices) {
#if MATRIX_PRODUCTS
#define ADD_QUADS(...) (rows > 1 ? add_pairs(__VA_ARGS__) : add_quads(__VA_ARGS__))
#else
#define ADD_QUADS(...) add_quads(__VA_ARGS__)
#endif
    for (int i = 0; i < rows * slices; i++) dots[i] = (slice_words){0};
    if (PARTS > 1) {
        int32_t upper = 0;
        for (int r = 0; r < rows; r++) upper |= x[r].upper;
        if (upper >> j & ((1 << count) - 1)) {
#if SHIFTS_CODES
            if (adds_both_parts(f, upper)) {
                add_both_parts(f, from, x, dots, j, count, rows, slices, upper);
                return;
            }
#endif
            ADD_QUADS(f, table, from, x, PARTS - 1, dots, j, count, rows, slices, upper);
#pragma GCC unroll 16
            for (int i = 0; i < rows * slices; i++) dots[i] <<= 8;
            /* Otherwise, GCC unpacks the codes once for both parts and keeps them in registers that the sums need. */
            for (int t = 0; t < slices && f.group == GROUP; t++) __asm__("" : "+r"(from[t]));
        }
    }
    ADD_QUADS(f, table, from, x, 0, dots, j, count, rows, slices, ALL_QUADS);
#if MATRIX_PRODUCTS
    for (int r = 0; r + 1 < rows; r += 2)
        for (int t = 0; t < slices; t++) part_rows(dots + r * slices + t, dots + (r + 1) * slices + t);
#endif
}

/* Return -zero times the sum of the activations of a group, or of one half: what to add to sums of products, because
 * the code `zero` stands for the weight 0. `zero` is a power of two. Additions and shifts of integers use other vector
 * units than products. */
INLINE slice_words zero_offset(const format f, const block *x, const int first, const int second) {
    slice_words sum = {0}; /* -GROUP times the sum of the activations */
    if (first) sum += x->first;
    if (second) {
        slice_words other = (slice_words){0} + x->second;
#if defined(__AVX512F__)
        __asm__("" : "+v"(other)); /* otherwise, GCC adds the numbers before it copies them to all lanes */
#endif
        sum += other;
    }
    return f.zero < GROUP ? sum >> __builtin_ctz(GROUP / f.zero) : sum << __builtin_ctz(f.zero / GROUP);
}

/* Multiply `rows` rows of x by `slices` slices of lanes: the slices from `lane` on of tiles that are `distance` bytes
 * apart, or adjacent slices of one tile if `distance` is 0. Write `sums` [rows, tiles]. The blocks of `stride` rows of
 * x are interleaved. Prefetch the weights that are `ahead` bytes after the read ones, unless `ahead` is 0.
 *
 * In a format of expanded codes, `tile` is a stretch of a tile, `matrix` has the expanded codes of the stretch for each
 * tile, and the products are added to `sums`. */
INLINE void multiply_slices(const format stored, const uint8_t *matrix, const uint8_t *tile, int64_t distance,
                            const block *x, int64_t groups, int64_t stride, lanes *sums, const int rows,
                            const int slices, int64_t ahead, int64_t lane) {
    const format f = SIGNED_CODES ? with_signed_codes(stored) : stored;
    const int looks_up = f.table && !f.entries;
    const int64_t step = SLICE == LANES ? 0 : SLICE; /* lanes from a slice to the next one */
    slice_bits table = looks_up ? load_table(matrix) : (slice_bits){0};
    if (SIGNED_CODES) table ^= 0x80808080u;
    slice acc[MAX_SUMS];
#define SUM(I) ((float *)(sums + (step ? (I) / slices : (I))) + lane + (I) % slices * step)
    for (int i = 0; i < rows * slices; i++) {
        acc[i] = (slice){0};
        if (has_expanded_codes(f)) memcpy(acc + i, SUM(i), sizeof *acc);
    }
    for (int64_t g = 0; g < groups; g++, x += stride) {
        slice_words dots[MAX_SUMS];
        slice scale[MAX_SLICES][2], minimum[MAX_SLICES][2], products[MAX_SUMS];
        const uint8_t *from[MAX_SLICES];
        for (int t = 0; t < slices; t++) {
            from[t] = lane_codes(f, tile + t * distance, g, lane + t * step);
            if (has_expanded_codes(f)) {
                const uint8_t *stretch = matrix + (step ? 0 : t * EXPANDED_STRETCH);
                from[t] = stretch + g * EXPANDED_GROUP + 4 * (lane + t * step);
            }
            if (ahead && (SLICE == LANES || t == 0)) {
                const uint8_t *later = tile + t * distance + ahead + g * group_bytes(f);
                for (int64_t line = 0; line < group_bytes(f); line += 64) prefetch_weights(later + line);
            }
        }
        if (f.group == GROUP) {
            dot_quads(f, table, from, x, dots, 0, QUADS, rows, slices);
            for (int t = 0; t < slices; t++)
                unpack_scales(f, tile + t * distance, g, lane + t * step, scale[t], minimum[t]);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                slice_words offset = f.zero ? zero_offset(f, x + r, 1, 1) : (slice_words){0};
#pragma GCC unroll 4
                for (int t = 0; t < slices; t++) {
                    const int i = r * slices + t;
                    if (f.zero) dots[i] += offset;
                    slice product = __builtin_convertvector(dots[i], slice) * scale[t][0];
                    acc[i] = slice_fused(product, fill(x[r].scale), acc[i]);
                    if (f.minimum) acc[i] = slice_fused(minimum[t][0], fill(x[r].scaled_sum), acc[i]);
                }
            }
            continue;
        }
        dot_quads(f, table, from, x, dots, 0, QUADS / 2, rows, slices);
        for (int t = 0; t < slices; t++)
            unpack_scales(f, tile + t * distance, g, lane + t * step, scale[t], minimum[t]);
#pragma GCC unroll 16
        for (int i = 0; i < rows * slices; i++) {
            if (f.zero) dots[i] += zero_offset(f, x + i / slices, 1, 0);
            products[i] = __builtin_convertvector(dots[i], slice) * scale[i % slices][0];
        }
        dot_quads(f, table, from, x, dots, QUADS / 2, QUADS / 2, rows, slices);
#pragma GCC unroll 16
        for (int i = 0; i < rows * slices; i++) {
            const block *activations = x + i / slices;
            if (f.zero) dots[i] += zero_offset(f, activations, 0, 1);
            slice product = slice_fused(__builtin_convertvector(dots[i], slice), scale[i % slices][1], products[i]);
            acc[i] = slice_fused(product, fill(activations->scale), acc[i]);
            if (f.minimum) {
                slice shift = minimum[i % slices][0] * (float)activations->first;
                shift = slice_fused(minimum[i % slices][1], fill((float)activations->second), shift);
                acc[i] = slice_fused(shift, fill(activations->scale * -0x1p-5f), acc[i]);
            }
        }
    }
    for (int i = 0; i < rows * slices; i++) memcpy(SUM(i), acc + i, sizeof *acc);
#undef SUM
}

#endif
