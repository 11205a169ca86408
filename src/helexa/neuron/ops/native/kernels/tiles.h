/* Layout of quantized matrices. The codes are the same as in the model file. They are stored in tiles of 16 rows, one
 * row per lane; each 32-bit lane holds the codes of four columns at once. A matrix is a sequence of tiles. If the
 * format has a table, the table is in 64 bytes before the first tile.
 *
 * A tile is a list of groups of 32 columns or, for formats with two scale levels, of stretches of 8 groups:
 *   group: codes; scale, 16 bits [16]; minimum float16 [16] if present
 *   stretch: unit float16 [16] and the minimums' unit float16 [16], or unit float32 [16]; scale codes
 *     [8 * halves * 16]; minimum codes of the same shape, if present; codes of 8 groups
 * `halves` is the number of scales per group: 1, or 2 if each half of a group has its own scale. Codes of a group: the
 * columns 4 j to 4 j + 3 of all rows form quad j, 64 bytes. With 4 to 6 bits per code, the low four bits of the quads
 * j and j + 4 share 64 bytes, and planes with the upper bits follow. With 2 or 3 bits per code, the low two bits of the
 * quads 0 to 3, or 4 to 7, share 64 bytes, and a plane with the third bits follows. In formats with a codebook, a group
 * contains indexes of codebook entries instead (see codebooks.h).
 *
 * weight = scale * (code - zero) + minimum. */
#ifndef TILES_H
#define TILES_H

#include "slices.h"

#define QUADS 8
#define SIGNED_TABLES 256 /* bytes of the tables of a format with a codebook (see codebooks.h) */

static const format FORMATS[FORMAT_COUNT] = {
    {4, 1, 0, 8, 32},                /* Q4_0 */
    {4, 1, 1, 0, 32},                /* Q4_1 */
    {5, 1, 0, 16, 32},               /* Q5_0 */
    {5, 1, 1, 0, 32},                /* Q5_1 */
    {8, 1, 0, 128, 32},              /* Q8_0 */
    {4, 2, 1, 0, 32},                /* Q4_K */
    {5, 2, 1, 0, 32},                /* Q5_K */
    {6, 2, 0, 32, 16},               /* Q6_K */
    {4, 1, 0, 128, 32, 1},           /* IQ4_NL */
    {4, 1, 0, 128, 32, 1, BFLOAT16}, /* MXFP4 */
    {4, 2, 0, 128, 32, 1, FLOAT32},  /* IQ4_XS */
    {3, 2, 0, 4, 16},                /* Q3_K */
    {2, 2, 1, 0, 16},                /* Q2_K */
    {2, 1, 0, 1, 32},                /* TQ1_0, TQ2_0, Q1_0 */
    {4, 2, 0, 128, 32, 1, FLOAT32, 2048, 8}, /* IQ1_S */
    {4, 2, 0, 128, 16, 1, FLOAT32, 2048, 8}, /* IQ1_M */
    {4, 2, 0, 128, 32, 1, FLOAT32, 256, 8},  /* IQ2_XXS */
    {4, 2, 0, 128, 16, 1, FLOAT32, 512, 8},  /* IQ2_XS */
    {4, 2, 0, 128, 16, 1, FLOAT32, 1024, 8}, /* IQ2_S */
    {4, 2, 0, 128, 32, 1, FLOAT32, 256, 4},  /* IQ3_XXS */
    {4, 2, 0, 128, 32, 1, FLOAT32, 512, 4},  /* IQ3_S */
};
#define EACH_FORMAT_OF_CODES(DO) \
    DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13)
#define EACH_FORMAT_OF_INDEXES(DO) DO(14) DO(15) DO(16) DO(17) DO(18) DO(19) DO(20)

/* Return the format `f` for codes that are reduced by 128, as the instructions for signed bytes require. */
INLINE format with_signed_codes(format f) {
    if (f.table || f.bits == 8) f.zero -= 128;
    return f;
}

INLINE int64_t halves_of(const format f) { return GROUP / f.group; }

/* Return whether a bit per entry shifts its values. The matrix then contains the codes of the entries, because lookups
 * of indexes in a large codebook take too long. In the other formats with a codebook, each weight has a sign. */
INLINE int is_shifted(const format f) { return f.entries == 2048; }

/* Return the number of bits of an index after the first eight. */
INLINE int more_bits(const format f) { return f.entries > 512 ? 2 : f.entries > 256; }

/* Return the number of bytes before the first tile: the table, and the values and codes of the codebook. */
INLINE int64_t head_bytes(const format f) {
    if (!f.table) return 0;
    int64_t codebook = is_shifted(f) ? 0 : f.entries * (f.width + 2);
    return f.entries ? 64 + SIGNED_TABLES + codebook : 64;
}

INLINE int64_t code_bytes(const format f) {
    if (f.bits == 8) return 512;
    if (f.entries) {
        int64_t indexes = LANES * GROUP / f.width, signs = LANES * GROUP / 8;
        return is_shifted(f) ? 2 * signs + indexes / 8 : indexes + indexes / 8 * more_bits(f) + signs;
    }
    return f.bits > 3 ? 256 + (f.bits - 4) * 64 : 64 * f.bits;
}

INLINE int64_t scale_bytes(const format f) {
    return f.levels == 1 ? 32 + 32 * f.minimum : halves_of(f) * 16 * (1 + f.minimum);
}

INLINE int64_t stretch_bytes(const format f) { return 64 + STRETCH_GROUPS * (code_bytes(f) + scale_bytes(f)); }

/* Return the mean number of bytes of a group, with its share of the units of a stretch. */
INLINE int64_t group_bytes(const format f) {
    return f.levels == 1 ? code_bytes(f) + scale_bytes(f) : stretch_bytes(f) / STRETCH_GROUPS;
}

/* Return the number of bytes of a tile of `columns` columns. */
INLINE int64_t tile_bytes(const format f, int64_t columns) { return columns / GROUP * group_bytes(f); }

/* Return the address of the codes of group `g` of a tile. */
INLINE const uint8_t *codes_of(const format f, const uint8_t *tile, int64_t g) {
    if (f.levels == 1) return tile + g * (code_bytes(f) + scale_bytes(f));
    const uint8_t *stretch = tile + g / STRETCH_GROUPS * stretch_bytes(f);
    return stretch + 64 + STRETCH_GROUPS * scale_bytes(f) + g % STRETCH_GROUPS * code_bytes(f);
}

/* Return the codes of quad `j` of a group, for the lanes from the lane on that `from` points to (see `lane_codes`). */
INLINE slice_bits quad_codes(const format f, const uint8_t *from, const int j) {
    if (f.bits == 8) return slice_load(from + 64 * j);
    if (f.bits < 4) {
        slice_bits codes = slice_load(from + 64 * (j / 4)) >> 2 * (j % 4) & 0x03030303u;
        if (f.bits == 2) return codes;
        slice_bits plane = slice_load(from + 128);
        return codes | ((j <= 2 ? plane << (2 - j) : plane >> (j - 2)) & 0x04040404u);
    }
    slice_bits both = slice_load(from + 64 * (j % 4));
    slice_bits codes = (j < 4 ? both : both >> 4) & 0x0f0f0f0fu;
    if (f.bits == 5) {
        slice_bits plane = slice_load(from + 256);
        codes |= (j <= 4 ? plane << (4 - j) : plane >> (j - 4)) & 0x10101010u;
    }
    if (f.bits == 6) {
        slice_bits plane = slice_load(from + 256 + 64 * (j / 4));
        codes |= (j % 4 <= 2 ? plane << (4 - 2 * (j % 4)) : plane >> 2) & 0x30303030u;
    }
    return codes;
}

/* Return the address of the codes of group `g` for the lanes from `lane` on. */
INLINE const uint8_t *lane_codes(const format f, const uint8_t *tile, int64_t g, int64_t lane) {
    return codes_of(f, tile, g) + 4 * lane;
}

INLINE slice load_unit(const format f, const uint8_t *from, int64_t lane) {
    if (f.unit == BFLOAT16) return slice_of_bfloats(from + 2 * lane);
    return f.unit == FLOAT32 ? (slice)slice_load(from + 4 * lane) : slice_of_halves(from + 2 * lane);
}

/* Return the scale of each half of group `g`, and the minimum if the format has minimums, for the lanes from `lane`
 * on. */
INLINE void unpack_scales(const format f, const uint8_t *tile, int64_t g, int64_t lane, slice *scale, slice *minimum) {
    if (f.levels == 1) {
        const uint8_t *at = codes_of(f, tile, g) + code_bytes(f);
        scale[0] = load_unit(f, at, lane);
        if (f.minimum) minimum[0] = slice_of_halves(at + 32 + 2 * lane);
        return;
    }
    const uint8_t *stretch = tile + g / STRETCH_GROUPS * stretch_bytes(f), *at = stretch + 64 + lane;
    slice unit = load_unit(f, stretch, lane);
    for (int64_t half = 0, i = g % STRETCH_GROUPS * halves_of(f); half < halves_of(f); half++, i++) {
        int is_unsigned = f.group == GROUP && !f.table;
        scale[half] = (is_unsigned ? slice_of_unsigned(at + i * 16) : slice_of_signed(at + i * 16)) * unit;
        if (f.minimum) {
            slice least = slice_of_halves(stretch + 32 + 2 * lane);
            minimum[half] = slice_of_unsigned(at + (STRETCH_GROUPS * halves_of(f) + i) * 16) * least;
        }
    }
}

#endif
