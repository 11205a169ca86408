/* Packing of indexes of codebook entries, and their expansion to codes of 8 bits (see codebooks.h). */
#include "codebooks.h"

void pack_codebook(const format f, const uint8_t *table, const uint8_t *codebook, uint8_t *to) {
    /* A table index has a code at the bits from `first` on, and a sign bit or the bit of a shift. */
    static const uint8_t first[2][4] = {{0, 2, 2, 4}, {0, 3, 0, 3}};
    const int kind = f.width == 4, count = f.width / 2, size = kind ? 3 : 2;
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 64; i++, to++) {
            uint8_t code = i >> first[kind][k] & ((1 << size) - 1), value = table[code];
            if (i >> sign_bit(f, k) & 1) value = is_shifted(f) ? table[SHIFTED + code] : -value;
            *to = value;
        }
    if (is_shifted(f)) return;
    uint8_t *packed = to + f.entries * f.width;
    for (int i = 0; i < f.entries * f.width; i++) to[i] = table[codebook[i]];
    for (int entry = 0; entry < f.entries; entry++)
        for (int half = 0; half < 2; half++) {
            int number = 0;
            for (int i = 0; i < count; i++) number |= codebook[entry * f.width + half * count + i] << size * i;
            packed[half * f.entries + entry] = (uint8_t)number;
        }
}

/* Pack the codes of one group of one row of a format with shifted entries. */
static void pack_shifted(const uint8_t *codes, uint8_t *to, int64_t lane) {
    for (int column = 0; column < GROUP; column++) {
        int bit = (int)lane * 4 + column / 8;
        to[column / 16 * 64 + 4 * lane + column % 16 / 4] |= (codes[column] & 3) << column % 4 * 2;
        if (column % 8 == 0) to[128 + bit / 8] |= (codes[column] >> 3) << bit % 8;
    }
}

void pack_indexes(const format f, const uint8_t *codes, const int32_t *places, uint8_t *to, int64_t lane) {
    int count = GROUP / f.width, base = f.width == 8 ? 3 : 8, vectors = count / 4;
    uint8_t *planes = to + LANES * count, *signs = planes + 8 * vectors * more_bits(f);
    if (is_shifted(f)) {
        pack_shifted(codes, to, lane);
        return;
    }
    for (int i = 0; i < count; i++, codes += f.width) {
        int place = 0, bit = (int)lane * 4 + i % 4;
        for (int k = f.width - 1; k >= 0; k--) place = place * base + (codes[k] & 7);
        int32_t index = places[place];
        to[i / 4 * 64 + bit] = (uint8_t)index;
        for (int p = 0; p < more_bits(f); p++)
            planes[8 * (i / 4 * more_bits(f) + p) + bit / 8] |= (index >> (8 + p) & 1) << bit % 8;
        for (int k = 0; k < f.width; k++) {
            int column = i * f.width + k;
            signs[4 * lane + column % 16 / 4] |= (codes[k] >> 3) << (sign_bit(f, k % 4) + column / 16 * 2);
        }
    }
}

#if defined(__AVX2__)
/* Return 32 bytes that are 255 where the bit of `bits` is set, else 0. */
INLINE __m256i bytes_of_bits(int32_t bits) {
    const __m256i spread = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, ONES, 0);
    const __m256i each = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, each), each);
}

/* Write 4 indexes of each row. `low` has the lower 8 bits of the indexes, and the planes from `plane` on the others. */
INLINE void read_indexes(const uint8_t *low, const uint8_t *plane, const int planes, uint16_t *indexes) {
    const __m256i each = _mm256_set_epi16(-32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1);
    for (int i = 0; i < 4; i++) {
        __m256i index = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)low + i));
        for (int p = 0; p < planes; p++) {
            int16_t bits;
            memcpy(&bits, plane + 8 * p + 2 * i, 2);
            __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(bits), each), each);
            index = _mm256_or_si256(index, _mm256_and_si256(set, _mm256_set1_epi16((int16_t)(256 << p))));
        }
        _mm256_storeu_si256((__m256i *)indexes + i, index);
    }
}

/* Return the entries with the indexes a, b, c and d. */
INLINE __m256 four_entries(const uint64_t *entries, uint16_t a, uint16_t b, uint16_t c, uint16_t d) {
    __m128i low = _mm_set_epi64x((int64_t)entries[b], (int64_t)entries[a]);
    __m128i high = _mm_set_epi64x((int64_t)entries[d], (int64_t)entries[c]);
    return (__m256)_mm256_set_m128i(high, low);
}

/* Expand 8 columns, from 8 * eighth on, of the rows from `row` to `row` + 7. `signs` has the sign bits of these
 * rows. */
INLINE void expand_rows(const format f, const uint8_t *values, uint16_t (*indexes)[64], __m256i signs, uint8_t *to,
                        const int row, const int eighth) {
    __m256i quads[2];
    if (f.width == 8) {
        const uint64_t *entries = (const uint64_t *)values;
        const uint16_t *at = indexes[0] + 4 * row + eighth;
        __m256 a = four_entries(entries, at[0], at[4], at[16], at[20]);
        __m256 b = four_entries(entries, at[8], at[12], at[24], at[28]);
        quads[0] = (__m256i)_mm256_shuffle_ps(a, b, 0x88), quads[1] = (__m256i)_mm256_shuffle_ps(a, b, 0xdd);
    } else {
        const int32_t *entries = (const int32_t *)values;
        for (int q = 0; q < 2; q++) {
            const uint16_t *at = indexes[eighth / 2] + 4 * row + eighth % 2 * 2 + q;
            quads[q] = _mm256_setr_epi32(entries[at[0]], entries[at[4]], entries[at[8]], entries[at[12]],
                                         entries[at[16]], entries[at[20]], entries[at[24]], entries[at[28]]);
        }
    }
    const __m128i first = _mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0); /* index of each row's first byte */
    for (int q = 0; q < 2; q++) {
        const __m256i own = _mm256_or_si256(_mm256_broadcastsi128_si256(first), _mm256_set1_epi8(eighth % 2 * 2 + q));
        const __m256i each = _mm256_set1_epi32((int32_t)(sign_bits(f) << eighth / 2 * 2));
        __m256i bytes = _mm256_shuffle_epi8(signs, own);
        __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, each), each);
        quads[q] = _mm256_sub_epi8(_mm256_xor_si256(quads[q], negative), negative);
        _mm256_storeu_si256((__m256i *)(to + 64 * (2 * eighth + q) + 4 * row), quads[q]);
    }
}

/* Expand a group with shifted entries. */
INLINE void expand_shifted(const uint8_t *matrix, const uint8_t *from, uint8_t *to) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)matrix));
    const __m256i rows = _mm256_broadcastsi128_si256(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
    for (int row = 0; row < LANES; row += 8) {
        int32_t bits;
        memcpy(&bits, from + 128 + row / 2, sizeof bits);
        __m256i shifted = _mm256_and_si256(bytes_of_bits(bits), _mm256_set1_epi8(SHIFTED)); /* a byte per entry */
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++) {
            __m256i numbers = _mm256_loadu_si256((const __m256i *)(from + q / 4 * 64 + 4 * row));
            __m256i own = _mm256_and_si256(_mm256_srli_epi32(numbers, q % 4 * 8), _mm256_set1_epi32(255));
            own = _mm256_or_si256(own, _mm256_slli_epi32(own, 12)); /* code k comes to byte k */
            own = _mm256_and_si256(_mm256_or_si256(own, _mm256_slli_epi32(own, 6)), _mm256_set1_epi8(3));
            __m256i shift = _mm256_shuffle_epi8(shifted, _mm256_or_si256(rows, _mm256_set1_epi8(q / 2)));
            __m256i values = _mm256_shuffle_epi8(table, _mm256_or_si256(own, shift));
            _mm256_storeu_si256((__m256i *)(to + 64 * q + 4 * row), values);
        }
    }
}

INLINE void expand_to(const format f, const uint8_t *matrix, const uint8_t *from, uint8_t *to) {
    const int planes = more_bits(f), vectors = 8 / f.width;
    const uint8_t *after = from + LANES * GROUP / f.width, *signs = after + 8 * vectors * planes;
    uint16_t indexes[2][64];
    if (is_shifted(f)) {
        expand_shifted(matrix, from, to);
        return;
    }
    for (int v = 0; v < vectors; v++) read_indexes(from + 64 * v, after + 8 * planes * v, planes, indexes[v]);
    for (int row = 0; row < LANES; row += 8) {
        __m256i of_rows = _mm256_loadu_si256((const __m256i *)(signs + 4 * row));
#pragma GCC unroll 4
        for (int eighth = 0; eighth < 4; eighth++) expand_rows(f, matrix + 64 + SIGNED_TABLES, indexes, of_rows, to, row, eighth);
    }
}
#else
/* Return the values of 8 columns, negated where the byte of `signs` is not 0. The bytes of `signs` are at most 128. */
INLINE uint64_t with_signs(uint64_t values, uint64_t signs) {
    uint64_t negative = ((signs + 0x7f * ONES) & 0x80 * ONES) >> 7; /* 1 or 0 per byte */
    return (values ^ negative * 255) + negative;
}

/* Return the sign bits of the 8 columns from 8 * eighth on, each in its byte. `signs` has the bits of one row. */
INLINE uint64_t column_signs(const format f, const uint8_t *signs, int eighth) {
    const uint8_t *at = signs + eighth % 2 * 2;
    uint64_t bytes = (at[0] | (uint64_t)at[1] << 32) * 0x01010101u;
    return bytes & (sign_bits(f) | (uint64_t)sign_bits(f) << 32) << eighth / 2 * 2;
}

/* Expand a group with shifted entries. */
INLINE void expand_shifted(const uint8_t *matrix, const uint8_t *from, uint8_t *to) {
    for (int q = 0; q < QUADS; q++)
        for (int row = 0; row < LANES; row++) {
            int number = from[q / 4 * 64 + 4 * row + q % 4], bit = 4 * row + q / 2;
            const uint8_t *table = matrix + (from[128 + bit / 8] >> bit % 8 & 1) * SHIFTED;
            for (int k = 0; k < 4; k++) to[64 * q + 4 * row + k] = table[number >> 2 * k & 3];
        }
}

INLINE void expand_to(const format f, const uint8_t *matrix, const uint8_t *from, uint8_t *to) {
    const uint8_t *values = matrix + 64 + SIGNED_TABLES, *signs = from + LANES * GROUP / f.width;
    const int planes = more_bits(f), vectors = 8 / f.width;
    uint64_t upper[4] = {0};
    if (is_shifted(f)) {
        expand_shifted(matrix, from, to);
        return;
    }
    memcpy(upper, signs, 8 * vectors * planes);
    signs += 8 * vectors * planes;
    for (int i = 0; i < 4 * LANES; i++) { /* the columns from 8 * (i % 4) on of row i / 4 */
        uint64_t eight = 0;
        for (int v = 0; v < vectors; v++) {
            int vector = vectors == 1 ? 0 : i % 4 / 2, bit = vectors == 1 ? i : i / 4 * 4 + i % 2 * 2 + v;
            int index = from[64 * vector + bit];
            for (int p = 0; p < planes; p++) index |= (upper[vector * planes + p] >> bit & 1) << (8 + p);
            uint64_t entry = 0;
            memcpy(&entry, values + index * f.width, f.width);
            eight |= entry << 32 * v;
        }
        eight = with_signs(eight, column_signs(f, signs + i / 4 * 4, i % 4));
        uint32_t *quads = (uint32_t *)(to + i % 4 * 128) + i / 4;
        quads[0] = (uint32_t)eight, quads[LANES] = (uint32_t)(eight >> 32);
    }
}
#endif

/* The prefetches are spread over the groups, because the processor waits if too many reads are outstanding. */
#define EXPAND(NUMBER) \
    static __attribute__((noinline)) void expand_##NUMBER(const uint8_t *matrix, const uint8_t *codes, uint8_t *to, \
                                                          int64_t ahead) { \
        const int64_t step = code_bytes(FORMATS[NUMBER]); \
        for (int g = 0; g < STRETCH_GROUPS; g++, codes += step) { \
            for (int64_t line = 0; ahead && line < step; line += 64) prefetch_weights(codes + ahead + line); \
            expand_to(FORMATS[NUMBER], matrix, codes, to + g * EXPANDED_GROUP); \
        } \
    }
EACH_FORMAT_OF_INDEXES(EXPAND)
#define CASE(NUMBER) \
    case NUMBER: expand_##NUMBER(matrix, codes, to, ahead); return;

void expand(int64_t number, const uint8_t *matrix, const uint8_t *stretch, uint8_t *to, int64_t ahead) {
    const uint8_t *codes = codes_of(FORMATS[number], stretch, 0);
    for (const uint8_t *scales = stretch; ahead && scales < codes; scales += 64) prefetch_weights(scales + ahead);
    switch (number) { EACH_FORMAT_OF_INDEXES(CASE) }
}
