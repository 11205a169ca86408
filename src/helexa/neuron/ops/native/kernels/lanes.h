/* Vectors of 16 lanes and operations on them. The compiler splits a vector if registers are narrower. All code paths
 * form sums in the same fixed order, and only explicit calls such as `fused` round a product and a sum together. The
 * result of a row therefore never depends on other rows in the batch. */
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

typedef float lanes __attribute__((vector_size(64)));
typedef int32_t words __attribute__((vector_size(64)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef float float8 __attribute__((vector_size(32)));
typedef float float4 __attribute__((vector_size(16)));
typedef int32_t words8 __attribute__((vector_size(32)));
typedef int32_t words4 __attribute__((vector_size(16)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));

/* Subtracting 0 changes no number, so that the compiler only copies the value to all lanes. Adding 0 would change -0. */
INLINE lanes all(float value) { return value - (lanes){0}; }

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
INLINE lanes fused(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
    z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]), z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
    memcpy(&c, z, 64);
    return c;
#else
    return a * b + c;
#endif
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

/* Load 16 signed 8-bit integers as float32. */
INLINE lanes load_signed(const void *from) {
#if defined(__AVX512F__)
    return (lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
    words wide;
    for (int i = 0; i < LANES; i++) wide[i] = ((const int8_t *)from)[i];
    return __builtin_convertvector(wide, lanes);
#endif
}

/* Store as bfloat16, rounded to nearest, ties to even. */
INLINE void store_rounded(uint16_t *to, lanes value) {
#if defined(__AVX512BF16__)
    __m256bh top = _mm512_cvtneps_pbh((__m512)value);
    memcpy(to, &top, sizeof top);
#else
    bits exact = (bits)value;
    halves top = __builtin_convertvector((exact + 0x7fff + ((exact >> 16) & 1)) >> 16, halves);
    memcpy(to, &top, sizeof top);
#endif
}

INLINE lanes where(words condition, lanes then, lanes otherwise) {
    return (lanes)(((words)then & condition) | ((words)otherwise & ~condition));
}

INLINE lanes larger(lanes a, lanes b) {
#if defined(__AVX512F__)
    return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    __m256 x[2], y[2];
    memcpy(x, &a, 64), memcpy(y, &b, 64);
    x[0] = _mm256_max_ps(x[0], y[0]), x[1] = _mm256_max_ps(x[1], y[1]);
    memcpy(&a, x, 64);
    return a;
#else
    words above = a > b;
    return (lanes)(((words)a & above) | ((words)b & ~above));
#endif
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
INLINE lanes power_of_two(lanes x) {
    x = larger(x, all(-126.0f));
    lanes shifted = x + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    lanes r = x - (shifted - 12582912.0f);
    lanes e = fused(r, all(1.535336188e-4f), all(1.339887440e-3f));
    e = fused(e, r, all(9.618437358e-3f));
    e = fused(e, r, all(5.550332471e-2f));
    e = fused(e, r, all(2.402264791e-1f));
    e = fused(e, r, all(6.931472029e-1f));
    e = fused(e, r, all(1.0f));
    return e * (lanes)(((bits)shifted + (127 - 0x4b400000)) << 23);
}

/* Return 1 / (1 + e^-x), computed from e^-|x|, which never overflows. */
INLINE lanes sigmoid(lanes x) {
    lanes small = power_of_two((lanes)((bits)x | 0x80000000u) * 1.44269504f);
    return where(x < 0.0f, small, all(1.0f)) / (small + 1.0f);
}

/* Return gate(x) for the gate SILU or GELU_TANH. Very negative numbers are limited first: their result is almost 0. */
INLINE lanes gated(lanes x, const int gate) {
    if (gate == SILU) {
        x = larger(all(-100.0f), x);
        return x * sigmoid(x);
    }
    x = larger(all(-10.0f), x); /* (1 + tanh(z / 2)) / 2 is the sigmoid of z */
    return x * sigmoid(x * fused(x * x, all(0.0713548163f), all(1.59576912f)));
}

/* Return e^-(x^2) for numbers of any size. */
INLINE lanes bell(lanes x) { return power_of_two(x * x * -1.44269504f); }

/* Return x times the distribution function of the normal distribution, (1 + erf(x / sqrt(2))) / 2. The polynomial for
 * erf is 7.1.26 of Abramowitz and Stegun, with an absolute error below 1.5e-7. */
INLINE lanes gelu(lanes x) {
    lanes size = (lanes)((bits)x & 0x7fffffffu) * 0.70710678f;
    lanes t = 1.0f / fused(size, all(0.3275911f), all(1.0f));
    lanes p = fused(t, all(1.061405429f), all(-1.453152027f));
    p = fused(p, t, all(1.421413741f));
    p = fused(p, t, all(-0.284496736f));
    p = fused(p, t, all(0.254829592f));
    lanes beyond = p * t * bell(size) * 0.5f; /* probability of a number above |x| */
    return x * where(x < 0.0f, beyond, 1.0f - beyond);
}

/* Return activation(x) for the activation SILU, GELU_TANH or GELU. */
INLINE lanes activated(lanes x, const int activation) { return activation == GELU ? gelu(x) : gated(x, activation); }

#endif
