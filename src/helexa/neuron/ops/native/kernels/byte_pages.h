/* Scores, weights and sums of weighted values of one page of an 8-bit KV cache. An instruction multiplies four bytes
 * per lane, and the sums of integers are exact.
 *
 * Large numbers that all keys of a page have in common, from a bias of the model, would dominate the scales of the
 * keys. A page therefore stores its first key, the base, in 16 bits, and the differences of keys from the base in 8
 * bits. A query times a key is the query times the base, computed in float32, plus the rounded query times the
 * difference.
 *
 * A score includes the logarithm of the value's scale, so that a weight includes this scale. The weights of a page are
 * rounded to bytes relative to the largest weight of the page, because relative to the largest weight of all pages,
 * they would be 0 in most pages. */
#ifndef BYTE_PAGES_H
#define BYTE_PAGES_H

#include "slices.h"

#if SLICE == LANES
#define BYTE_ROWS 12 /* rows of a block, whose sums stay in registers */
#else
#define BYTE_ROWS 4
#endif
#define BYTE_SLICES 4 /* slices of a block of up to BYTE_ROWS / 2 rows; larger blocks have half as many */

#define MOST_CODE 127       /* largest rounded number of a query */
#define MOST_WEIGHT 254     /* largest rounded weight: 2 * 127, for processors that multiply only signed bytes */
#define MOST_WEIGHT_LOG2 7.98868469f
#define QUAD_STRIDE (MAX_DIM / 4 + 4) /* quads from one query to the next; a power of two would use few L1 sets */

/* The queries of a tile and one KV head. The unit of a query is NaN if any of its numbers is infinite or NaN. */
typedef struct {
    quad codes[MAX_QUERIES * QUAD_STRIDE] __attribute__((aligned(64)));
    float numbers[MAX_DIM][MAX_QUERIES] __attribute__((aligned(64))); /* not rounded, for products with the base */
    float units[MAX_QUERIES];
    int32_t offsets[MAX_QUERIES]; /* added to sums of products, because the code of the difference 0 is 128 */
} byte_queries;

/* The queries of a tile on one page: their scores without the product of the base, their weights, and the factors for
 * the sums of earlier pages and for the weights of this page. `each` has one vector per query: first the largest
 * scores, later the sums of weights, in each lane. The lanes of several queries are then combined at once, because the
 * processor would otherwise wait for each query. `peaks` and `totals` are the softmax of the pages up to this page (see
 * `state`). */
typedef struct {
    float scores[MAX_QUERIES][PAGE_SIZE] __attribute__((aligned(64)));
    uint8_t weights[MAX_QUERIES][PAGE_SIZE] __attribute__((aligned(64)));
    float base[MAX_QUERIES] __attribute__((aligned(64))), units[MAX_QUERIES] __attribute__((aligned(64)));
    float keep[MAX_QUERIES] __attribute__((aligned(64))), share[MAX_QUERIES] __attribute__((aligned(64)));
    float peaks[MAX_QUERIES] __attribute__((aligned(64))), totals[MAX_QUERIES] __attribute__((aligned(64)));
    lanes each[MAX_QUERIES];
} byte_work;

/* Prefetch bytes into the L2 cache. */
INLINE void prefetch_bytes(const uint8_t *at, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
}

/* Round the query `q` of a tile, float32 [dim]. */
static void load_byte_query(const float *from, int64_t dim, byte_queries *to, int64_t q) {
    quad *quads = to->codes + q * QUAD_STRIDE;
    uint8_t codes[MAX_DIM];
    lanes size = {0};
    words total = {0};
    for (int64_t i = 0; i < dim; i += LANES) size = larger_size(size, load(from + i));
    float peak = largest_size(size, size), off = peak - peak; /* `off` is NaN if a number is not finite, else 0 */
    lanes steps = all(off == 0 && peak > 0 ? MOST_CODE / peak : 0);
    for (int64_t i = 0; i < dim; i += LANES) {
        lanes value = off == 0 ? load(from + i) * steps : (lanes){0};
        total += (words)(bits)(value + ROUNDER) - 0x4b400000;
        store_low_bytes(codes + i, (bits)(value + ROUNDER));
    }
    for (int64_t i = 0; i < dim; i++) to->numbers[i][q] = from[i];
    for (int64_t i = 0; i < dim; i += 4) {
#if defined(VNNI)
        memcpy(&quads[i / 4].bytes, codes + i, 4);
#else
        int16_t wide[4];
        for (int64_t j = 0; j < 4; j++) wide[j] = (int8_t)codes[i + j];
        int16_t order[4] = {wide[0], wide[2], wide[1], wide[3]};
        memcpy(quads[i / 4].pairs, order, sizeof order);
#endif
    }
    to->units[q] = peak / MOST_CODE + off;
    to->offsets[q] = SIGNED_CODES ? 0 : -128 * sum_words(total);
}

/* Compute the products of `count` queries and the base of a page, bfloat16 [dim]. */
INLINE void base_scores(const byte_queries *queries, const bfloat16 *base, int64_t dim, int64_t count, float *scores) {
    float numbers[MAX_DIM];
    for (int64_t i = 0; i < dim; i += LANES) store(numbers + i, load_bfloats(base + i));
    for (int64_t q = 0; q < count; q += SLICE) {
        slice sums[4] = {{0}};
        for (int64_t i = 0; i < dim; i += 4)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                slice query = (slice)slice_load(queries->numbers[i + j] + q);
                sums[j] = slice_fused(query, fill(numbers[i + j]), sums[j]);
            }
        slice_store(scores + q, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
}

/* Compute scores [rows, PAGE_SIZE] for the slices from position `at` on. A score is the product of the codes of a query
 * and a key [dim / 4, PAGE_SIZE, 4], times the unit of the query, the scale of the key and `scale`, plus the logarithm
 * of the scale of the value. `scales` has the scales of keys [PAGE_SIZE], and then the logarithms of the scales of
 * values. */
INLINE void score_byte_block(const quad *queries, const int32_t *offsets, const float *units, float scale,
                             const uint8_t *keys, const float *scales, const uint8_t *ahead, int64_t dim,
                             float (*scores)[PAGE_SIZE], int64_t at, const int rows, const int slices) {
    slice_words sums[BYTE_ROWS * BYTE_SLICES / 2];
#pragma GCC unroll 64
    for (int i = 0; i < rows * slices; i++) sums[i] = (slice_words){0} + offsets[i / slices];
    for (int64_t d = 0; d < dim / 4; d += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            slice_bits loaded[BYTE_SLICES];
            int64_t first = 4 * ((d + j) * PAGE_SIZE + at);
            for (int i = 0; i < slices; i++) loaded[i] = slice_load(keys + first + 4 * SLICE * i);
            for (int i = 0; SIGNED_CODES && i < slices; i++) loaded[i] ^= 0x80808080u; /* code - 128 */
            prefetch_bytes(ahead + first, 4 * SLICE * slices);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int i = 0; i < slices; i++)
                    sums[r * slices + i] = dot4(sums[r * slices + i], loaded[i], queries + r * QUAD_STRIDE + d, j);
        }
    slice unit[BYTE_SLICES], logarithm[BYTE_SLICES];
    for (int i = 0; i < slices; i++) {
        unit[i] = (slice)slice_load(scales + at + SLICE * i) * scale;
        logarithm[i] = (slice)slice_load(scales + PAGE_SIZE + at + SLICE * i);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < slices; i++) {
            slice sum = __builtin_convertvector(sums[r * slices + i], slice);
            slice_store(scores[r] + at + SLICE * i, slice_fused(sum, unit[i] * units[r], logarithm[i]));
        }
}

/* Return, for each lane, acc + the dot product of the lane's four signed bytes in `values` and the four unsigned bytes
 * in `weights`, which are at most MOST_WEIGHT. */
INLINE slice_words weigh4(slice_words acc, slice_bits values, uint32_t weights) {
#if defined(__AVX512VNNI__)
    return (slice_words)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32((int)weights), (__m512i)values);
#elif defined(__AVXVNNI__) && SLICE == 8
    return (slice_words)_mm256_dpbusd_avx_epi32((__m256i)acc, _mm256_set1_epi32((int)weights), (__m256i)values);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (slice_words)vusdotq_s32((int32x4_t)acc, (uint8x16_t)vdupq_n_u32(weights), (int8x16_t)values);
#elif defined(__ARM_FEATURE_DOTPROD)
    uint32_t half = weights >> 1 & 0x7f7f7f7fu;
    acc = (slice_words)vdotq_s32((int32x4_t)acc, (int8x16_t)vdupq_n_u32(half), (int8x16_t)values);
    return (slice_words)vdotq_s32((int32x4_t)acc, (int8x16_t)vdupq_n_u32(weights - half), (int8x16_t)values);
#elif defined(__AVX512BW__)
    __m512i even = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)values, 8), 8);
    __m512i odd = _mm512_srai_epi16((__m512i)values, 8);
    acc += (slice_words)_mm512_madd_epi16(even, _mm512_set1_epi32((int)(weights & 0x00ff00ffu)));
    return acc + (slice_words)_mm512_madd_epi16(odd, _mm512_set1_epi32((int)(weights >> 8 & 0x00ff00ffu)));
#elif SLICE == 8
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)values, 8), 8);
    __m256i odd = _mm256_srai_epi16((__m256i)values, 8);
    acc += (slice_words)_mm256_madd_epi16(even, _mm256_set1_epi32((int)(weights & 0x00ff00ffu)));
    return acc + (slice_words)_mm256_madd_epi16(odd, _mm256_set1_epi32((int)(weights >> 8 & 0x00ff00ffu)));
#else
    acc += ((slice_words)(values << 24) >> 24) * (int32_t)(weights & 0xff);
    acc += ((slice_words)(values << 16) >> 24) * (int32_t)(weights >> 8 & 0xff);
    acc += ((slice_words)(values << 8) >> 24) * (int32_t)(weights >> 16 & 0xff);
    return acc + ((slice_words)values >> 24) * (int32_t)(weights >> 24);
#endif
}

/* out [rows, dim] = out * keep + share * weights [rows, PAGE_SIZE] times values [PAGE_SIZE / 4, dim, 4], for the slices
 * from column `at` on. */
INLINE void weigh_byte_block(const uint8_t *weights, const uint8_t *values, const uint8_t *ahead, int64_t dim,
                             float *out, const float *keep, const float *share, int64_t visible, int64_t at,
                             const int rows, const int slices) {
    slice_words sums[BYTE_ROWS * BYTE_SLICES / 2];
#pragma GCC unroll 64
    for (int i = 0; i < rows * slices; i++) sums[i] = (slice_words){0};
    for (int64_t p = 0; p < visible; p += 4) {
        slice_bits loaded[BYTE_SLICES];
        int64_t first = p * dim + 4 * at;
        for (int i = 0; i < slices; i++) loaded[i] = slice_load(values + first + 4 * SLICE * i);
        prefetch_bytes(ahead + first, 4 * SLICE * slices);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            uint32_t four;
            memcpy(&four, weights + r * PAGE_SIZE + p, sizeof four);
#pragma GCC unroll 4
            for (int i = 0; i < slices; i++) sums[r * slices + i] = weigh4(sums[r * slices + i], loaded[i], four);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < slices; i++) {
            float *to = out + r * dim + at + SLICE * i;
            slice product = __builtin_convertvector(sums[r * slices + i], slice) * share[r];
            slice_store(to, slice_fused((slice)slice_load(to), fill(keep[r]), product));
        }
}

#define EACH_BYTE_ROW_COUNT(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
_Static_assert(BYTE_ROWS <= 12, "EACH_BYTE_ROW_COUNT has each number of rows");

/* Compute the scores of the first `visible` positions of a page for the queries [begin, end), as exponents of two if
 * `scale` contains LOG2_E. Some scores after these positions are computed, too. Prefetch the page `ahead`. */
INLINE void score_bytes(const byte_queries *queries, float scale, const uint8_t *keys, const float *scales,
                        const uint8_t *ahead, int64_t dim, byte_work *page, int64_t begin, int64_t end,
                        int64_t visible) {
    for (int64_t row = begin, count; row < end; row += count) {
        count = end - row < BYTE_ROWS ? end - row : BYTE_ROWS;
#define SCORE_BYTES(ROWS) \
    case ROWS: \
        if (ROWS > BYTE_ROWS) break; \
        for (int64_t at = 0; at < visible; at += SLICE * BYTE_SLICES / (1 + (2 * ROWS > BYTE_ROWS))) \
            score_byte_block(queries->codes + row * QUAD_STRIDE, queries->offsets + row, queries->units + row, scale, \
                             keys, scales, ahead, dim, page->scores + row, at, ROWS, \
                             BYTE_SLICES / (1 + (2 * ROWS > BYTE_ROWS))); \
        break;
        switch (count) { EACH_BYTE_ROW_COUNT(SCORE_BYTES) }
    }
}

/* Compute the largest score of query `q` at the positions [begin, end) of a page, in each lane. */
INLINE void largest_scores(byte_work *page, int64_t q, int32_t begin, int32_t end, const int masked) {
    lanes most = all(-INFINITY);
    for (int i = 0; i < PAGE_SIZE / LANES; i++) {
        lanes score = load(page->scores[q] + LANES * i);
        if (masked) score = where(within(LANES * i, begin, end), score, all(-INFINITY));
        most = larger(most, score);
    }
    page->each[q] = most;
}

/* Update the peaks of the softmax of the queries [begin, end), and compute the units of their weights and the
 * factors. */
INLINE void update_peaks(byte_work *page, float scale, int begin, int end) {
    for (int q = begin / LANES * LANES; q < end; q += LANES) {
        lanes unit = largest_each(page->each + q, end - q) - MOST_WEIGHT_LOG2, own = unit + load(page->base + q) * scale;
        lanes previous = load(page->peaks + q), peak = where(own > previous, own, previous);
        store(page->units + q, unit);
        store(page->peaks + q, where(within(q, begin, end), peak, previous));
        store(page->keep + q, power_of_two(previous - peak));
        store(page->share + q, power_of_two(own - peak));
    }
}

/* Add the weights of a page to the totals of the softmax of the queries [begin, end). */
INLINE void update_totals(byte_work *page, int begin, int end) {
    for (int q = begin / LANES * LANES; q < end; q += LANES) {
        lanes previous = load(page->totals + q), share = sum_each(page->each + q, end - q) * load(page->share + q);
        lanes total = previous * load(page->keep + q) + share;
        store(page->totals + q, where(within(q, begin, end), total, previous));
    }
}

/* Compute the weights 2^(score - unit) of query `q` for the positions [begin, end) of a page, and their sum in each
 * lane. A weight includes the scale of its value. The sum does not: it multiplies each weight by the reciprocal in
 * `inverses`. */
INLINE void weights_from(byte_work *page, int64_t q, const float *inverses, int32_t begin, int32_t end,
                          const int masked) {
    const float unit = page->units[q];
    lanes total = {0};
    for (int i = 0; i < PAGE_SIZE / LANES; i++) {
        lanes weight = short_power(load(page->scores[q] + LANES * i) - unit), inverse = load(inverses + LANES * i);
        if (masked) {
            words seen = within(LANES * i, begin, end);
            weight = where(seen, weight, (lanes){0}), inverse = where(seen, inverse, (lanes){0});
        }
        total = fused(weight, inverse, total);
        store_low_bytes(page->weights[q] + LANES * i, (bits)(weight + ROUNDER));
    }
    page->each[q] = total;
}

/* Add the weighted values of the first `visible` positions of a page to the sums of the queries [begin, end). */
INLINE void weigh_bytes(const byte_work *page, const uint8_t *values, const uint8_t *ahead, int64_t dim, float *out,
                        int64_t begin, int64_t end, int64_t visible) {
    for (int64_t row = begin, count; row < end; row += count) {
        int64_t at = 0;
        count = end - row < BYTE_ROWS ? end - row : BYTE_ROWS;
#define WEIGH_BYTES(ROWS, SLICES) \
    for (; at + SLICE * (SLICES) <= dim; at += SLICE * (SLICES)) \
        weigh_byte_block(page->weights[row], values, ahead, dim, out + row * dim, page->keep + row, \
                         page->share + row, visible, at, ROWS, SLICES);
#define WEIGH_BYTE_ROWS(ROWS) \
    case ROWS: \
        if (ROWS > BYTE_ROWS) break; \
        if (2 * ROWS <= BYTE_ROWS) WEIGH_BYTES(ROWS, BYTE_SLICES) \
        WEIGH_BYTES(ROWS, BYTE_SLICES / 2) \
        WEIGH_BYTES(ROWS, 1) \
        break;
        switch (count) { EACH_BYTE_ROW_COUNT(WEIGH_BYTE_ROWS) }
    }
}

#endif
