/* Loads and dot products of slices (see lanes.h). */
#ifndef SLICES_H
#define SLICES_H

#include "lanes.h"

/* Whether the processor has 32 registers for slices. Otherwise it has 16. */
#if SLICE == LANES || defined(__aarch64__)
#define MANY_REGISTERS 1
#else
#define MANY_REGISTERS 0
#endif

/* VNNI: the processor has an instruction for the dot products of four bytes.
 * SIGNED_CODES: this instruction takes only signed bytes.
 * MATRIX_PRODUCTS: the processor has an instruction for the products of two rows with two lanes of eight bytes each. */
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && SLICE == 8) || defined(__ARM_FEATURE_DOTPROD)
#define VNNI
#endif
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
#define SIGNED_CODES 1
#else
#define SIGNED_CODES 0
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define MATRIX_PRODUCTS 1
#else
#define MATRIX_PRODUCTS 0
#endif
/* SHIFTS_CODES: the instruction takes unsigned codes, so that codes of 5 or 6 bits can be shifted to the top of a byte
 * (see `add_both_parts`). */
#if defined(VNNI) && !SIGNED_CODES && !MATRIX_PRODUCTS
#define SHIFTS_CODES 1
#else
#define SHIFTS_CODES 0
#endif

/* Number of slices that products multiply at once, so that the sums stay in registers. If a slice has all lanes, these
 * are slices of up to MAX_TILES adjacent tiles. Otherwise, they are slices of one tile. */
#if SLICE == LANES
#define MAX_TILES 2
#define FEW_ROWS_SLICES 1
#define MANY_ROWS_SLICES 1
#elif MANY_REGISTERS
#define MAX_TILES 1
#define FEW_ROWS_SLICES 4
#define MANY_ROWS_SLICES 2
#else
#define MAX_TILES 1
#define FEW_ROWS_SLICES 1
#define MANY_ROWS_SLICES 1
#endif
#define MAX_SLICES (MAX_TILES > FEW_ROWS_SLICES ? MAX_TILES : FEW_ROWS_SLICES)

/* Products of one tile prefetch weights this many bytes ahead. The processor itself prefetches too few bytes. */
#define AHEAD 6144

/* Prefetch 64 bytes of weights into the L2 cache, because the L1 cache supports too few outstanding reads. */
INLINE void prefetch_weights(const uint8_t *at) { __builtin_prefetch(at, 0, 2); }

INLINE slice_bits slice_load(const void *from) {
    slice_bits value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void slice_store(float *to, slice value) { memcpy(to, &value, sizeof value); }

/* Return, for each lane, acc + the dot product of the lane's two bfloat16 numbers in `pairs` and the two in `pair`. */
INLINE slice slice_dot2(slice acc, slice_bits pairs, uint32_t pair) {
#if defined(__AVX512BF16__)
    return (slice)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)pair));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    slice_bits same = (slice_bits){0} + pair;
    return (slice)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)pairs, (bfloat16x8_t)same);
#else
    slice_bits same = (slice_bits){0} + pair;
#if SLICE == 8
    __asm__("" : "+x"(same)); /* without this line, GCC splits `pair` first and broadcasts each half separately */
#endif
    acc = slice_fused((slice)(pairs & 0xffff0000u), (slice)(same & 0xffff0000u), acc);
    return slice_fused((slice)(pairs << 16), (slice)(same << 16), acc);
#endif
}

/* Load float16 numbers as float32, exactly. */
INLINE slice slice_of_halves(const uint8_t *from) {
#if defined(__AVX512F__)
    return (slice)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__) && SLICE == 8
    return (slice)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    float16x4_t stored;
    memcpy(&stored, from, sizeof stored);
    return (slice)vcvt_f32_f16(stored);
#else
    slice_halves stored;
    memcpy(&stored, from, sizeof stored);
    slice_bits wide = __builtin_convertvector(stored, slice_bits);
    slice size = (slice)((wide & 0x7fff) << 13) * 0x1p112f;
    return (slice)((slice_bits)size | (wide & 0x8000) << 16);
#endif
}

/* Load bfloat16 numbers as float32, exactly. */
INLINE slice slice_of_bfloats(const uint8_t *from) {
    slice_halves stored;
    memcpy(&stored, from, sizeof stored);
#if defined(__aarch64__)
    return (slice)vshll_n_u16((uint16x4_t)stored, 16);
#else
    return (slice)(__builtin_convertvector(stored, slice_bits) << 16);
#endif
}

/* Load integers from 0 to 255 as float32. */
INLINE slice slice_of_unsigned(const uint8_t *from) {
#if defined(__AVX512F__)
    return (slice)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif SLICE == 8
    return (slice)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#elif defined(__aarch64__)
    uint32_t stored;
    memcpy(&stored, from, sizeof stored);
    return (slice)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(stored)))));
#else
    slice_words wide;
    for (int i = 0; i < SLICE; i++) wide[i] = from[i];
    return __builtin_convertvector(wide, slice);
#endif
}

/* Load integers from -128 to 127 as float32. */
INLINE slice slice_of_signed(const uint8_t *from) {
#if defined(__AVX512F__)
    return (slice)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif SLICE == 8
    return (slice)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#elif defined(__aarch64__)
    uint32_t stored;
    memcpy(&stored, from, sizeof stored);
    return (slice)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(stored)))));
#else
    slice_words wide;
    for (int i = 0; i < SLICE; i++) wide[i] = (int8_t)from[i];
    return __builtin_convertvector(wide, slice);
#endif
}

/* Four activations, which every lane multiplies with its own four codes. With VNNI, the activations have 8 bits.
 * Without VNNI, they have 16 bits, in the order first, third, second, fourth. */
typedef struct {
#if defined(VNNI)
    int32_t bytes;
#else
    int32_t pairs[2];
#endif
} quad;

#if !defined(VNNI)
/* Return, for each lane, acc + the dot product of the lane's two 16-bit numbers in `numbers`, which must not be
 * negative, and the two 16-bit numbers in `pair`. */
INLINE slice_words dot_pair(slice_words acc, slice_bits numbers, int32_t pair) {
#if defined(__AVX512BW__)
    return acc + (slice_words)_mm512_madd_epi16((__m512i)numbers, _mm512_set1_epi32(pair));
#elif SLICE == 8
    return acc + (slice_words)_mm256_madd_epi16((__m256i)numbers, _mm256_set1_epi32(pair));
#else
    return acc + (slice_words)(numbers & 0xffff) * (int16_t)pair + (slice_words)(numbers >> 16) * (pair >> 16);
#endif
}
#endif

/* Return, for each lane, acc + the dot product of the lane's four codes (0 to 255, or -128 to 127 if SIGNED_CODES) and
 * the four numbers in quad `q` of eight. */
INLINE slice_words dot4(slice_words acc, slice_bits codes, const quad *quads, int q) {
#if defined(__AVX512VNNI__)
    return (slice_words)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(quads[q].bytes));
#elif defined(__AVXVNNI__) && SLICE == 8
    return (slice_words)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, _mm256_set1_epi32(quads[q].bytes));
#elif defined(__ARM_FEATURE_DOTPROD)
    int8x16_t four; /* four quads; the instruction selects one by an index, which must be constant */
    memcpy(&four, quads + q / 4 * 4, sizeof four);
#if SIGNED_CODES
#define DOT4(INDEX) (slice_words)vdotq_laneq_s32((int32x4_t)acc, (int8x16_t)codes, four, INDEX)
#else
#define DOT4(INDEX) (slice_words)vusdotq_laneq_s32((int32x4_t)acc, (uint8x16_t)codes, four, INDEX)
#endif
    return q % 4 == 0 ? DOT4(0) : q % 4 == 1 ? DOT4(1) : q % 4 == 2 ? DOT4(2) : DOT4(3);
#else
    acc = dot_pair(acc, codes & 0x00ff00ffu, quads[q].pairs[0]);
    return dot_pair(acc, codes >> 8 & 0x00ff00ffu, quads[q].pairs[1]);
#endif
}

#if MATRIX_PRODUCTS
/* Two sums of each of two lanes: of the products with one row of activations, and with another row. */
typedef slice_words lane_pairs;

/* Put the codes of two quads side by side: in `pairs[0]` for the first two lanes of a slice, in `pairs[1]` for the
 * other two lanes. */
INLINE void join_quads(slice_bits first, slice_bits second, slice_bits *pairs) {
    pairs[0] = (slice_bits)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second);
    pairs[1] = (slice_bits)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second);
}

/* Return two adjacent quads of one row and the same quads of another row. */
INLINE slice_bits load_quads(const quad *row, const quad *other) {
    return (slice_bits)vcombine_s8(vld1_s8((const int8_t *)row), vld1_s8((const int8_t *)other));
}

/* Add the products of the codes of two lanes, eight of each, and the eight numbers of each of two rows in `quads`. */
INLINE lane_pairs dot8(lane_pairs acc, slice_bits codes, slice_bits quads) {
    return (lane_pairs)vusmmlaq_s32((int32x4_t)acc, (uint8x16_t)codes, (int8x16_t)quads);
}

/* Change the sums of the first two lanes and of the other two lanes to the sums of one row and of the other row. */
INLINE void part_rows(slice_words *first, slice_words *second) {
    int32x4_t low = (int32x4_t)*first, high = (int32x4_t)*second;
    *first = (slice_words)vuzp1q_s32(low, high), *second = (slice_words)vuzp2q_s32(low, high);
}
#endif

/* Load a table of 16 bytes for `look_up`. */
INLINE slice_bits load_table(const void *from) {
    slice_bits table;
    for (int i = 0; i < SLICE / 4; i++) memcpy((uint8_t *)&table + 16 * i, from, 16);
    return table;
}

/* Replace each byte of `places` (below 16) by the entry of the table at this index. */
INLINE slice_bits look_up(slice_bits table, slice_bits places) {
#if defined(__AVX512BW__)
    return (slice_bits)_mm512_shuffle_epi8((__m512i)table, (__m512i)places);
#elif SLICE == 8
    return (slice_bits)_mm256_shuffle_epi8((__m256i)table, (__m256i)places);
#elif defined(__aarch64__)
    return (slice_bits)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)places);
#else
    uint8_t known[16], each[sizeof places];
    memcpy(known, &table, 16), memcpy(each, &places, sizeof places);
    for (int i = 0; i < (int)sizeof places; i++) each[i] = known[each[i]];
    memcpy(&places, each, sizeof places);
    return places;
#endif
}

#endif
