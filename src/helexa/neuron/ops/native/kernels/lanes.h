/* Vectors of 16 lanes and operations on them. The compiler splits a vector if registers are narrower. All code paths
 * form sums in the same fixed order, and only explicit calls such as `fused` round a product and a sum together. The
 * result of a row therefore never depends on other rows in the batch.
 *
 * A slice is the part of a vector that fits one register of the processor. Loops that must keep values in registers use
 * slices, because the compiler keeps wider vectors in memory, and compares and selects their lanes one by one. With every
 * slice width, each lane has the same result. */
#ifndef LANES_H
#define LANES_H

#include "kernels.h"

#include <math.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LOG2_E 1.44269504f
#define ROUNDER 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer in the low bits */

typedef float lanes __attribute__((vector_size(64)));
typedef int32_t words __attribute__((vector_size(64)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef float float8 __attribute__((vector_size(32)));
typedef float float4 __attribute__((vector_size(16)));
typedef int32_t words8 __attribute__((vector_size(32)));
typedef int32_t words4 __attribute__((vector_size(16)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));

#if defined(__AVX512F__)
#define SLICE 16
#elif defined(__AVX2__)
#define SLICE 8
#else
#define SLICE 4
#endif

typedef float slice __attribute__((vector_size(4 * SLICE)));
typedef int32_t slice_words __attribute__((vector_size(4 * SLICE)));
typedef uint32_t slice_bits __attribute__((vector_size(4 * SLICE)));
typedef uint16_t slice_halves __attribute__((vector_size(2 * SLICE)));

/* A vector as its slices. */
typedef union {
    lanes all;
    slice each[LANES / SLICE];
} slices;
#define EACH_SLICE for (int i = 0; i < LANES / SLICE; i++)

/* Subtracting 0 changes no number, so that the compiler only copies the value to all lanes. Adding 0 would change -0. */
INLINE lanes all(float value) { return value - (lanes){0}; }

/* Return which of the LANES positions from `first` on are in the range [begin, end). */
INLINE words within(int first, int32_t begin, int32_t end) {
    const words indices = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (indices < end - first) & (indices >= begin - first);
}

INLINE slice fill(float value) { return value - (slice){0}; }

INLINE lanes load(const float *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, lanes value) { memcpy(to, &value, sizeof value); }

INLINE bits load_bits(const void *from) {
    bits value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Return a * b + c, rounded once if the processor supports it. */
INLINE slice slice_fused(slice a, slice b, slice c) {
#if defined(__AVX512F__)
    return (slice)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && SLICE == 8
    return (slice)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (slice)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE lanes fused(lanes a, lanes b, lanes c) {
    slices x = {a}, y = {b}, z = {c};
    EACH_SLICE z.each[i] = slice_fused(x.each[i], y.each[i], z.each[i]);
    return z.all;
}

/* Load 16 float16 numbers as float32, exactly. */
INLINE lanes load_half(const void *from) {
    halves stored;
    memcpy(&stored, from, sizeof stored);
#if defined(__AVX512F__)
    return (lanes)_mm512_cvtph_ps((__m256i)stored);
#else
    bits wide = __builtin_convertvector(stored, bits);
    lanes size = (lanes)((wide & 0x7fff) << 13) * 0x1p112f;
    return (lanes)((bits)size | (wide & 0x8000) << 16);
#endif
}

/* Load 16 bfloat16 numbers as float32, exactly. */
INLINE lanes load_bfloats(const bfloat16 *from) {
    halves stored;
    memcpy(&stored, from, sizeof stored);
    return (lanes)(__builtin_convertvector(stored, bits) << 16);
}

/* Store as bfloat16, rounded to nearest, ties to even. */
INLINE void store_rounded(uint16_t *to, lanes value) {
#if defined(__AVX512BF16__)
    __m256bh top = _mm512_cvtneps_pbh((__m512)value);
    memcpy(to, &top, sizeof top);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    slices exact = {value};
    EACH_SLICE vst1_bf16((bfloat16_t *)to + 4 * i, vcvt_bf16_f32((float32x4_t)exact.each[i]));
#else
    bits exact = (bits)value;
    halves top = __builtin_convertvector((exact + 0x7fff + ((exact >> 16) & 1)) >> 16, halves);
    memcpy(to, &top, sizeof top);
#endif
}

INLINE lanes where(words condition, lanes then, lanes otherwise) {
    return (lanes)(((words)then & condition) | ((words)otherwise & ~condition));
}

INLINE slice slice_where(slice_words condition, slice then, slice otherwise) {
    return (slice)(((slice_words)then & condition) | ((slice_words)otherwise & ~condition));
}

/* Return the larger number, or b if a or b is NaN. */
INLINE slice slice_larger(slice a, slice b) {
#if defined(__AVX512F__)
    return (slice)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (slice)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return slice_where(a > b, a, b);
#endif
}

INLINE lanes larger(lanes a, lanes b) {
    slices x = {a}, y = {b};
    EACH_SLICE x.each[i] = slice_larger(x.each[i], y.each[i]);
    return x.all;
}

INLINE float sum(lanes value) {
    float8 eighths[2];
    memcpy(eighths, &value, sizeof value);
    eighths[0] += eighths[1];
    float4 quarters[2];
    memcpy(quarters, eighths, sizeof quarters);
    quarters[0] += quarters[1];
    return (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
}

INLINE float largest(lanes value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float8 eighths[2];
    memcpy(eighths, &value, sizeof value);
    words8 above = eighths[0] > eighths[1];
    eighths[0] = (float8)(((words8)eighths[0] & above) | ((words8)eighths[1] & ~above));
    float most = eighths[0][0];
    for (int i = 1; i < 8; i++) most = eighths[0][i] > most ? eighths[0][i] : most;
    return most;
#endif
}

/* Define `NAME[4]`: each of the LANES vectors is reduced to one part of four lanes, by combining its four parts. The
 * parts of NAME[i] are of the vectors i, i + 4, i + 8 and i + 12. Parts of several vectors are combined at once, so that
 * all instructions compute 16 lanes. */
#if defined(__AVX512F__)
#define COMBINE_PARTS(NAME, values, COMBINE) \
    __m512 eight[8], NAME[4]; \
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) { \
        __m512 a = (__m512)(values)[i / 2 + i % 2 * 8], b = (__m512)(values)[i / 2 + i % 2 * 8 + 4]; \
        eight[i] = COMBINE(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); \
    } \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) { \
        __m512 a = eight[2 * i], b = eight[2 * i + 1]; \
        NAME[i] = COMBINE(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); \
    }

/* Return from the function with the combined lanes of LANES vectors, one lane per vector, in the order of `sum` and
 * `largest`. */
#define RETURN_EACH(values, COMBINE) \
    COMBINE_PARTS(four, values, COMBINE) \
    __m512 two[2]; \
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) { \
        __m512d a = (__m512d)four[2 * i], b = (__m512d)four[2 * i + 1]; \
        two[i] = COMBINE((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b)); \
    } \
    return (lanes)COMBINE(_mm512_shuffle_ps(two[0], two[1], 0x88), _mm512_shuffle_ps(two[0], two[1], 0xdd));

#define LARGER_WORDS(a, b) (__m512) _mm512_max_epi32((__m512i)(a), (__m512i)(b))
#define SUM_OF_WORDS(a, b) (__m512) _mm512_add_epi32((__m512i)(a), (__m512i)(b))

/* Return the largest magnitudes of LANES vectors of magnitudes. Compared as integers, magnitudes have the same order as
 * numbers, and NaN is the largest. */
INLINE lanes largest_size_each(const lanes *sizes) { RETURN_EACH(sizes, LARGER_WORDS) }
#endif

/* Return the sums of the first `count` of LANES vectors. The other lanes of the result have no meaning. */
INLINE lanes sum_each(const lanes *values, int count) {
#if defined(__AVX512F__)
    (void)count;
    RETURN_EACH(values, _mm512_add_ps)
#else
    float each[LANES] = {0};
    for (int i = 0; i < count && i < LANES; i++) each[i] = sum(values[i]);
    return load(each);
#endif
}

/* Return the largest numbers of the first `count` of LANES vectors. The other lanes of the result have no meaning. */
INLINE lanes largest_each(const lanes *values, int count) {
#if defined(__AVX512F__)
    (void)count;
    RETURN_EACH(values, _mm512_max_ps)
#else
    float each[LANES] = {0};
    for (int i = 0; i < count && i < LANES; i++) each[i] = largest(values[i]);
    return load(each);
#endif
}

/* Return the largest magnitude of 32 numbers, or infinity or NaN if any number is infinite or NaN. Compared as integers,
 * magnitudes have the same order as numbers, and NaN is the largest. */
INLINE float largest_size(lanes a, lanes b) {
    words x = (words)a & 0x7fffffff, y = (words)b & 0x7fffffff;
    int32_t most;
    float size;
#if defined(__AVX512F__)
    most = _mm512_reduce_max_epi32(_mm512_max_epi32((__m512i)x, (__m512i)y));
#elif defined(__AVX2__)
    __m256i first[2], second[2];
    memcpy(first, &x, sizeof first), memcpy(second, &y, sizeof second);
    first[0] = _mm256_max_epi32(_mm256_max_epi32(first[0], first[1]), _mm256_max_epi32(second[0], second[1]));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(first[0]), _mm256_extracti128_si256(first[0], 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    most = _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#elif defined(__aarch64__)
    int32x4_t first[4], second[4];
    memcpy(first, &x, sizeof first), memcpy(second, &y, sizeof second);
    for (int i = 0; i < 4; i++) first[i] = vmaxq_s32(first[i], second[i]);
    most = vmaxvq_s32(vmaxq_s32(vmaxq_s32(first[0], first[1]), vmaxq_s32(first[2], first[3])));
#else
    words8 eighths[2];
    words above = x > y;
    x = (x & above) | (y & ~above);
    memcpy(eighths, &x, sizeof x);
    words8 more = eighths[0] > eighths[1];
    eighths[0] = (eighths[0] & more) | (eighths[1] & ~more);
    most = eighths[0][0];
    for (int i = 1; i < 8; i++) most = eighths[0][i] > most ? eighths[0][i] : most;
#endif
    memcpy(&size, &most, sizeof size);
    return size;
}

/* Return the larger of a magnitude and the magnitude of a value in each lane; NaN is larger than all numbers. */
INLINE lanes larger_size(lanes size, lanes value) {
    slices x = {size}, y = {value};
    EACH_SLICE {
        slice_words a = (slice_words)x.each[i], b = (slice_words)y.each[i] & 0x7fffffff;
#if defined(__AVX512F__)
        x.each[i] = (slice)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
        x.each[i] = (slice)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
        x.each[i] = slice_where(b > a, (slice)b, (slice)a);
#endif
    }
    return x.all;
}

/* Store the lowest byte of each word. Compilers convert vectors to bytes one lane after another. */
INLINE void store_low_bytes(uint8_t *to, bits value) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)value));
#elif defined(__AVX2__)
    __m256i half[2];
    value &= 255;
    memcpy(half, &value, sizeof half);
    half[0] = _mm256_permute4x64_epi64(_mm256_packus_epi32(half[0], half[1]), 0xd8);
    __m128i low = _mm256_castsi256_si128(half[0]), high = _mm256_extracti128_si256(half[0], 1);
    _mm_storeu_si128((__m128i *)to, _mm_packus_epi16(low, high));
#elif defined(__aarch64__)
    uint32x4_t four[4];
    memcpy(four, &value, sizeof four);
    uint16x8_t low = vcombine_u16(vmovn_u32(four[0]), vmovn_u32(four[1]));
    uint16x8_t high = vcombine_u16(vmovn_u32(four[2]), vmovn_u32(four[3]));
    vst1q_u8(to, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
#else
    for (int i = 0; i < LANES; i++) to[i] = (uint8_t)value[i];
#endif
}

INLINE int32_t sum_words(words value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)value);
#else
    words8 eighths[2];
    memcpy(eighths, &value, sizeof value);
    eighths[0] += eighths[1];
    words4 quarters[2];
    memcpy(quarters, eighths, sizeof quarters);
    quarters[0] += quarters[1];
    return (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
#endif
}

/* Return a number whose bit i is set if word i of the four words is not 0. */
INLINE int32_t nonzero(const void *from) {
    words4 value;
    memcpy(&value, from, sizeof value);
#if defined(__AVX512VL__)
    return _mm_test_epi32_mask((__m128i)value, (__m128i)value);
#else
    return (value[0] != 0) | (value[1] != 0) << 1 | (value[2] != 0) << 2 | (value[3] != 0) << 3;
#endif
}

/* Return 2^x for x up to 127: an integer power of 2, times a polynomial of the remainder r, |r| <= 1/2. */
INLINE slice slice_power(slice x) {
    x = slice_larger(x, fill(-126.0f));
    slice shifted = x + ROUNDER;
    slice r = x - (shifted - ROUNDER);
    slice e = slice_fused(r, fill(1.535336188e-4f), fill(1.339887440e-3f));
    e = slice_fused(e, r, fill(9.618437358e-3f));
    e = slice_fused(e, r, fill(5.550332471e-2f));
    e = slice_fused(e, r, fill(2.402264791e-1f));
    e = slice_fused(e, r, fill(6.931472029e-1f));
    e = slice_fused(e, r, fill(1.0f));
    return e * (slice)(((slice_bits)shifted + (127 - 0x4b400000)) << 23);
}

INLINE lanes power_of_two(lanes x) {
    slices result = {x};
    EACH_SLICE result.each[i] = slice_power(result.each[i]);
    return result.all;
}

/* Return 2^x as `slice_power`, but with a relative error of up to 3e-6, and for x up to 120. */
INLINE slice slice_short_power(slice x) {
#if defined(__AVX512F__)
    slice whole = (slice)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
    x = slice_larger(x, fill(-126.0f));
    slice shifted = x + ROUNDER, whole = shifted - ROUNDER;
#endif
    slice r = x - whole;
    slice e = slice_fused(r, fill(9.570096742e-3f), fill(5.591786059e-2f));
    e = slice_fused(e, r, fill(2.402474496e-1f));
    e = slice_fused(e, r, fill(6.931218147e-1f));
    e = slice_fused(e, r, fill(9.999992614e-1f));
#if defined(__AVX512F__)
    return (slice)_mm512_scalef_ps((__m512)e, (__m512)whole);
#else
    return e * (slice)(((slice_bits)shifted + (127 - 0x4b400000)) << 23);
#endif
}

INLINE lanes short_power(lanes x) {
    slices result = {x};
    EACH_SLICE result.each[i] = slice_short_power(result.each[i]);
    return result.all;
}

/* Return 1 / (1 + e^-x), computed from e^-|x|, which never overflows. */
INLINE slice slice_sigmoid(slice x) {
    slice small = slice_power((slice)((slice_bits)x | 0x80000000u) * LOG2_E);
    return slice_where(x < 0.0f, small, fill(1.0f)) / (small + 1.0f);
}

INLINE lanes sigmoid(lanes x) {
    slices result = {x};
    EACH_SLICE result.each[i] = slice_sigmoid(result.each[i]);
    return result.all;
}

/* Return cap * tanh(x / cap). The product with 0 is NaN for infinity and NaN, which `sigmoid` may ignore. */
INLINE lanes soft_capped(lanes x, float cap) { /* tanh(z) = 2 * sigmoid(2 * z) - 1 */
    return (sigmoid(x * (2.0f / cap)) * 2.0f - 1.0f) * cap + x * 0.0f;
}

/* Return gate(x) for the gate SILU or GELU_TANH. Very negative numbers are limited first: their result is almost 0. */
INLINE slice slice_gated(slice x, const int gate) {
    if (gate == SILU) {
        x = slice_larger(fill(-100.0f), x);
        return x * slice_sigmoid(x);
    }
    x = slice_larger(fill(-10.0f), x); /* (1 + tanh(z / 2)) / 2 is the sigmoid of z */
    return x * slice_sigmoid(x * slice_fused(x * x, fill(0.0713548163f), fill(1.59576912f)));
}

/* Return x times the distribution function of the normal distribution, (1 + erf(x / sqrt(2))) / 2. The polynomial for
 * erf is 7.1.26 of Abramowitz and Stegun, with an absolute error below 1.5e-7. */
INLINE slice slice_gelu(slice x) {
    slice size = (slice)((slice_bits)x & 0x7fffffffu) * 0.70710678f;
    slice t = 1.0f / slice_fused(size, fill(0.3275911f), fill(1.0f));
    slice p = slice_fused(t, fill(1.061405429f), fill(-1.453152027f));
    p = slice_fused(p, t, fill(1.421413741f));
    p = slice_fused(p, t, fill(-0.284496736f));
    p = slice_fused(p, t, fill(0.254829592f));
    slice bell = slice_power(size * size * -LOG2_E); /* e^-(size^2) */
    slice beyond = p * t * bell * 0.5f;                   /* probability of a number above |x| */
    return x * slice_where(x < 0.0f, beyond, 1.0f - beyond);
}

INLINE lanes gated(lanes x, const int gate) {
    slices result = {x};
    EACH_SLICE result.each[i] = slice_gated(result.each[i], gate);
    return result.all;
}

/* Return activation(x) for the activation SILU, GELU_TANH, GELU or RELU2. */
INLINE lanes activated(lanes x, const int activation) {
    slices result = {x};
    if (activation == RELU2) {
        EACH_SLICE result.each[i] = slice_larger(fill(0.0f), result.each[i]) * result.each[i];
        return result.all;
    }
    if (activation != GELU) return gated(x, activation);
    EACH_SLICE result.each[i] = slice_gelu(result.each[i]);
    return result.all;
}

#if defined(__clang__)
#define MIX(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define MIX(A, B, ...) __builtin_shuffle(A, B, (words){__VA_ARGS__})
#endif
#define LIST(...) __VA_ARGS__

/* One step of a transposition: for each pair of vectors i and i + BY, swap the lanes of vector i whose index has the
 * bit BY set with the other lanes of vector i + BY. */
#define EXCHANGE(BY, FIRST, SECOND) \
    for (int i = 0; i < LANES; i++) \
        if (!(i & BY)) { \
            bits a = m[i], b = m[i + BY]; \
            m[i] = MIX(a, b, FIRST), m[i + BY] = MIX(a, b, SECOND); \
        }

/* Transpose 16 vectors of 16 words. */
INLINE void transpose(bits *m) {
#pragma GCC unroll 16
    EXCHANGE(8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
             LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
             LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
             LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
             LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
}

#endif
