/* Products of attention with one page of a bfloat16 KV cache: scores = queries times keys, and out += weights times
 * values. Queries and weights are bfloat16, too. An instruction multiplies a pair of numbers per lane.
 *
 * A block is the product of up to MOST_ROWS rows and some slices of the page. Its sums stay in registers. The sums of a
 * row are formed in the same order in blocks of all sizes. The page that is read next is prefetched to the L2
 * cache in each block, because the processor itself prefetches only within 4 KiB. */
#ifndef PAGE_PRODUCTS_H
#define PAGE_PRODUCTS_H

#include "slices.h"

#if SLICE == LANES
#define MOST_ROWS 12 /* rows of a block */
#else
#define MOST_ROWS 4 /* limited by the number of registers */
#endif
#define MOST_SLICES 4 /* slices of a block of up to MOST_ROWS / 2 rows; larger blocks have half as many */

#define QUERY_STRIDE (MAX_DIM + 32) /* numbers from one query to the next; a power of two would use few L1 sets */

/* The queries of a tile on one page: their scores, their weights, and the factors for the sums of earlier pages. */
typedef struct {
    float scores[MAX_QUERIES][PAGE_SIZE] __attribute__((aligned(64)));
    uint16_t weights[MAX_QUERIES][PAGE_SIZE] __attribute__((aligned(64)));
    float keep[MAX_QUERIES] __attribute__((aligned(64)));
} page_work;

/* Prefetch the bytes of `count` numbers from number `at` on. */
INLINE void prefetch_numbers(const uint8_t *numbers, int64_t at, const int count) {
    for (int64_t byte = 0; byte < 2 * count; byte += 64) __builtin_prefetch(numbers + 2 * at + byte, 0, 2);
}

/* Add to the sums of a block the dot products of the first pair of each row of `pairs` [rows, stride] and the pairs in
 * `loaded` [slices]. */
INLINE void add_pairs(slice *sums, const uint16_t *pairs, const int stride, const slice_bits *loaded,
                      const int rows, const int slices) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        uint32_t pair;
        memcpy(&pair, pairs + r * stride, sizeof pair);
#pragma GCC unroll 4
        for (int i = 0, at = r * slices; i < slices; i++, at++) sums[at] = slice_dot2(sums[at], loaded[i], pair);
    }
}

/* scores [rows, PAGE_SIZE] = queries [rows, QUERY_STRIDE] times keys [dim / 2, PAGE_SIZE, 2], for the slices from
 * position `at` on. */
INLINE void score_block(const uint16_t *queries, const uint8_t *keys, const uint8_t *ahead, int64_t dim,
                        float (*scores)[PAGE_SIZE], int64_t at, const int rows, const int slices) {
    slice sums[MOST_ROWS * MOST_SLICES / 2];
    for (int i = 0; i < rows * slices; i++) sums[i] = (slice){0};
    for (int64_t d = 0; d < dim; d += 2) {
        slice_bits loaded[MOST_SLICES];
        int64_t first = d * PAGE_SIZE + 2 * at;
        for (int i = 0; i < slices; i++) loaded[i] = slice_load(keys + 2 * (first + 2 * SLICE * i));
        prefetch_numbers(ahead, first, 2 * SLICE * slices);
        add_pairs(sums, queries + d, QUERY_STRIDE, loaded, rows, slices);
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < slices; i++) slice_store(scores[r] + at + SLICE * i, sums[r * slices + i]);
}

/* out [rows, dim] = out * keep + weights [rows, PAGE_SIZE] times values [PAGE_SIZE / 2, dim, 2], for the slices
 * from column `at` on. Values from position `visible` on may be NaN and are ignored. */
INLINE void weigh_block(const uint16_t *weights, const uint8_t *values, const uint8_t *ahead, int64_t dim, float *out,
                        const float *keep, int64_t visible, int64_t at, const int rows, const int slices) {
    slice sums[MOST_ROWS * MOST_SLICES / 2];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < slices; i++)
            sums[r * slices + i] = (slice)slice_load(out + r * dim + at + SLICE * i) * keep[r];
    for (int64_t p = 0; p < visible; p += 2) {
        slice_bits loaded[MOST_SLICES];
        int64_t first = p * dim + 2 * at;
        for (int i = 0; i < slices; i++) loaded[i] = slice_load(values + 2 * (first + 2 * SLICE * i));
        if (p + 1 == visible)
            for (int i = 0; i < slices; i++) loaded[i] &= 0xffffu;
        prefetch_numbers(ahead, first, 2 * SLICE * slices);
        add_pairs(sums, weights + p, PAGE_SIZE, loaded, rows, slices);
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < slices; i++) slice_store(out + r * dim + at + SLICE * i, sums[r * slices + i]);
}

#define EACH_ROW_COUNT(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
_Static_assert(MOST_ROWS <= 12, "EACH_ROW_COUNT has each number of rows");

/* Compute the scores of the first `visible` positions of a page, for `rows` rows of queries. Some scores after these
 * positions are computed, too. Prefetch the page `ahead`. */
INLINE void score(const uint16_t *queries, const uint8_t *keys, const uint8_t *ahead, int64_t dim,
                  float (*scores)[PAGE_SIZE], int64_t rows, int64_t visible) {
    for (int64_t row = 0, count; row < rows; row += count) {
        count = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
#define SCORE(ROWS) \
    case ROWS: \
        if (ROWS > MOST_ROWS) break; \
        for (int64_t at = 0; at < visible; at += SLICE * MOST_SLICES / (1 + (2 * ROWS > MOST_ROWS))) \
            score_block(queries + row * QUERY_STRIDE, keys, ahead, dim, scores + row, at, ROWS, \
                        MOST_SLICES / (1 + (2 * ROWS > MOST_ROWS))); \
        break;
        switch (count) { EACH_ROW_COUNT(SCORE) }
    }
}

/* Compute the weights of query `q` for the positions [begin, end) of a page, update the peak of the query's softmax,
 * and return the sum of the weights. Write the factor for the sums of earlier pages to `keep`, as an exponent of
 * two. */
INLINE float weights_of(page_work *page, int64_t q, float scale, int32_t begin, int32_t end, float *peak,
                        const int masked) {
    lanes score[PAGE_SIZE / LANES], most = all(*peak), total = {0};
    for (int i = 0; i < PAGE_SIZE / LANES; i++) {
        score[i] = load(page->scores[q] + LANES * i) * scale;
        if (masked) score[i] = where(within(LANES * i, begin, end), score[i], all(-INFINITY));
        most = larger(most, score[i]);
    }
    float previous = *peak, highest = *peak = largest(most);
    for (int i = 0; i < PAGE_SIZE / LANES; i++) {
        lanes weight = power_of_two(score[i] - highest);
        if (masked) weight = where(within(LANES * i, begin, end), weight, (lanes){0});
        total += weight;
        store_rounded(page->weights[q] + LANES * i, weight);
    }
    page->keep[q] = previous - highest;
    return sum(total);
}

/* Add the weighted values of the first `visible` positions of a page to the sums of `rows` rows. */
INLINE void weigh(const uint16_t *weights, const uint8_t *values, const uint8_t *ahead, int64_t dim, float *out,
                  const float *keep, int64_t rows, int64_t visible) {
    for (int64_t row = 0, count; row < rows; row += count) {
        int64_t at = 0;
        count = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
#define WEIGH(ROWS, SLICES) \
    for (; at + SLICE * (SLICES) <= dim; at += SLICE * (SLICES)) \
        weigh_block(weights + row * PAGE_SIZE, values, ahead, dim, out + row * dim, keep + row, visible, at, ROWS, \
                    SLICES);
#define WEIGH_ROWS(ROWS) \
    case ROWS: \
        if (ROWS > MOST_ROWS) break; \
        if (2 * ROWS <= MOST_ROWS) WEIGH(ROWS, MOST_SLICES) \
        WEIGH(ROWS, MOST_SLICES / 2) \
        WEIGH(ROWS, 1) \
        break;
        switch (count) { EACH_ROW_COUNT(WEIGH_ROWS) }
    }
}

#endif
