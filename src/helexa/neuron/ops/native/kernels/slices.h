/* A slice is the part of a vector of 16 lanes that fits one register of the processor. Loops that must keep values in
 * registers use slices, because the compiler keeps wider vectors in memory. With every slice width, each lane has the
 * same result. */
#ifndef SLICES_H
#define SLICES_H

#include "lanes.h"

#if defined(__AVX512F__)
#define SLICE 16
#elif defined(__AVX2__)
#define SLICE 8
#else
#define SLICE 4
#endif

/* VNNI: the processor has an instruction for the dot products of four bytes. */
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && SLICE == 8)
#define VNNI
#endif

/* Products of one tile prefetch weights this many bytes ahead. The processor itself prefetches too few. */
#define AHEAD 6144

/* Prefetch 64 bytes of weights into the L2 cache. The L1 cache can wait for too few reads from memory at once. */
INLINE void prefetch_weights(const uint8_t *at) { __builtin_prefetch(at, 0, 2); }

typedef float slice __attribute__((vector_size(4 * SLICE)));
typedef int32_t slice_words __attribute__((vector_size(4 * SLICE)));
typedef uint32_t slice_bits __attribute__((vector_size(4 * SLICE)));

/* See `all`. */
INLINE slice fill(float value) { return value - (slice){0}; }

INLINE slice_bits slice_load(const void *from) {
    slice_bits value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Return a * b + c, rounded once if the processor supports it. */
INLINE slice slice_fused(slice a, slice b, slice c) {
#if defined(__AVX512F__)
    return (slice)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && SLICE == 8
    return (slice)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Return, for each lane, acc + the dot product of the lane's two bfloat16 numbers in `pairs` and the two in `pair`. */
INLINE slice slice_dot2(slice acc, slice_bits pairs, uint32_t pair) {
#if defined(__AVX512BF16__)
    return (slice)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)pair));
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
#else
    uint16_t stored[SLICE];
    slice_bits wide;
    memcpy(stored, from, sizeof stored);
    for (int i = 0; i < SLICE; i++) wide[i] = stored[i];
    slice size = (slice)((wide & 0x7fff) << 13) * 0x1p112f;
    return (slice)((slice_bits)size | (wide & 0x8000) << 16);
#endif
}

/* Load bfloat16 numbers as float32, exactly. */
INLINE slice slice_of_bfloats(const uint8_t *from) {
    uint16_t stored[SLICE];
    slice_bits wide;
    memcpy(stored, from, sizeof stored);
    for (int i = 0; i < SLICE; i++) wide[i] = stored[i];
    return (slice)(wide << 16);
}

/* Load integers from 0 to 255 as float32. */
INLINE slice slice_of_unsigned(const uint8_t *from) {
#if defined(__AVX512F__)
    return (slice)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif SLICE == 8
    return (slice)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
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

/* Return, for each lane, acc + the dot product of the lane's four codes (0 to 255) and the four numbers in `four`. */
INLINE slice_words dot4(slice_words acc, slice_bits codes, const quad *four) {
#if defined(__AVX512VNNI__)
    return (slice_words)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(four->bytes));
#elif defined(VNNI)
    return (slice_words)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, _mm256_set1_epi32(four->bytes));
#else
    acc = dot_pair(acc, codes & 0x00ff00ffu, four->pairs[0]);
    return dot_pair(acc, codes >> 8 & 0x00ff00ffu, four->pairs[1]);
#endif
}

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
