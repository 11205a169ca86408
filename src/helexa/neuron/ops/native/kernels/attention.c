/* Causal attention over the paged KV cache, and attention without a mask within frames. A tile of queries reads the KV
 * pages of its sequence one after another, and rescales its softmax after each page. A segment is SEGMENT_POSITIONS
 * positions. The result of each segment is merged into the result of the earlier segments. Pages and segments begin at
 * fixed positions, and masked positions add nothing. The result of a row therefore does not depend on the other rows of
 * the tile, or on whether one item or several items compute the segments. */
#include "slices.h"
#include "graph.h"

#if SLICE == LANES
#define TOGETHER 6 /* queries whose sums stay in registers */
#define SLICES 4    /* slices of sums per query */
#else
#define TOGETHER 4
#define SLICES 2
#endif
#define LOG2_E 1.44269504f

static const words INDICES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Softmax over some positions: total = sum of 2^(score - peak). A peak of -inf means no positions yet. */
typedef struct {
    float peak, total;
} state;

/* scores [rows, PAGE_SIZE] = queries [rows, dim] times keys [dim / 2, PAGE_SIZE, 2], for the first `slices` slices of
 * positions. */
INLINE void score_rows(const bfloat16 *const *queries, const bfloat16 *keys, int64_t dim, float (*scores)[PAGE_SIZE],
                       const int rows, const int slices) {
    slice acc[TOGETHER][SLICES];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < slices; i++) acc[r][i] = (slice){0};
    for (int64_t d = 0; d < dim; d += 2) {
        slice_bits loaded[SLICES];
        for (int i = 0; i < slices; i++) loaded[i] = slice_load(keys + d * PAGE_SIZE + 2 * SLICE * i);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, queries[r] + d, sizeof pair);
            for (int i = 0; i < slices; i++) acc[r][i] = slice_dot2(acc[r][i], loaded[i], pair);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < slices; i++) memcpy(scores[r] + SLICE * i, acc[r] + i, sizeof acc[r][i]);
}

/* acc [rows, slices] += the weights at positions p and p + 1 times the values at these positions. `mask` clears the
 * value at p + 1 if no query sees it. */
INLINE void weigh_pair(slice (*acc)[SLICES], bfloat16 (*weights)[PAGE_SIZE], const bfloat16 *values, int64_t p,
                       int64_t dim, const uint32_t mask, const int rows, const int slices) {
    slice_bits loaded[SLICES];
    for (int i = 0; i < slices; i++) loaded[i] = slice_load(values + p * dim + 2 * SLICE * i) & mask;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        uint32_t pair;
        memcpy(&pair, weights[r] + p, sizeof pair);
#pragma GCC unroll 4
        for (int i = 0; i < slices; i++) acc[r][i] = slice_dot2(acc[r][i], loaded[i], pair);
    }
}

/* sums [rows, dim] = sums * keep + weights [rows, PAGE_SIZE] times values [PAGE_SIZE / 2, dim, 2], for the first
 * `slices` slices of `dim`. The function ignores values after the last visible position, because they may be NaN. */
INLINE void weigh_rows(bfloat16 (*weights)[PAGE_SIZE], const bfloat16 *values, int64_t dim, float *sums,
                       const float *keep, int64_t visible, const int rows, const int slices) {
    slice acc[TOGETHER][SLICES];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < slices; i++) acc[r][i] = (slice)slice_load(sums + r * dim + SLICE * i) * keep[r];
    for (int64_t p = 0; p + 1 < visible; p += 2) weigh_pair(acc, weights, values, p, dim, 0xffffffffu, rows, slices);
    if (visible % 2) weigh_pair(acc, weights, values, visible - 1, dim, 0xffffu, rows, slices);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < slices; i++) memcpy(sums + r * dim + SLICE * i, acc[r] + i, sizeof acc[r][i]);
}

INLINE void score_parts(const bfloat16 *const *queries, const bfloat16 *keys, int64_t dim, float (*scores)[PAGE_SIZE],
                        int rows, const int slices) {
    for (; rows >= TOGETHER; rows -= TOGETHER, queries += TOGETHER, scores += TOGETHER)
        score_rows(queries, keys, dim, scores, TOGETHER, slices);
    if (rows >= 4) score_rows(queries, keys, dim, scores, 4, slices), rows -= 4, queries += 4, scores += 4;
    if (rows == 3) score_rows(queries, keys, dim, scores, 3, slices);
    if (rows == 2) score_rows(queries, keys, dim, scores, 2, slices);
    if (rows == 1) score_rows(queries, keys, dim, scores, 1, slices);
}

/* Compute the scores of the first `visible` positions of a page, for all rows of queries. */
static void score(const bfloat16 *const *queries, const bfloat16 *keys, int64_t dim, float (*scores)[PAGE_SIZE],
                  int rows, int64_t visible) {
    for (; visible > 0; visible -= SLICES * SLICE, keys += 2 * SLICES * SLICE) {
        if (visible > 3 * SLICE && SLICES == 4) score_parts(queries, keys, dim, scores, rows, 4);
        else if (visible > 2 * SLICE && SLICES == 4) score_parts(queries, keys, dim, scores, rows, 3);
        else if (visible > SLICE) score_parts(queries, keys, dim, scores, rows, 2);
        else score_parts(queries, keys, dim, scores, rows, 1);
        scores = (float (*)[PAGE_SIZE])(*scores + SLICES * SLICE);
    }
}

static void weigh(bfloat16 (*weights)[PAGE_SIZE], const bfloat16 *values, int64_t dim, float *sums, const float *keep,
                  int rows, int64_t visible) {
    int64_t d = 0;
    for (; d + SLICES * SLICE <= dim; d += SLICES * SLICE) {
        int r = 0;
#define WEIGH(ROWS) weigh_rows(weights + r, values + 2 * d, dim, sums + r * dim + d, keep + r, visible, ROWS, SLICES)
        for (; rows - r >= TOGETHER; r += TOGETHER) WEIGH(TOGETHER);
        if (rows - r >= 4) WEIGH(4), r += 4;
        if (rows - r == 3) WEIGH(3);
        if (rows - r == 2) WEIGH(2);
        if (rows - r == 1) WEIGH(1);
    }
    for (; d < dim; d += SLICE)
        for (int r = 0; r < rows; r++)
            weigh_rows(weights + r, values + 2 * d, dim, sums + r * dim + d, keep + r, visible, 1, 1);
}

/* Convert one page of an 8-bit cache to bfloat16. */
static void widen(const uint8_t *block, int64_t dim, bfloat16 *to) {
    const int8_t *keys = (const int8_t *)block, *values = keys + PAGE_SIZE * dim;
    const float *scales = (const float *)(block + 2 * PAGE_SIZE * dim);
    bfloat16 *wide_values = to + PAGE_SIZE * dim;
    for (int64_t d = 0; d < dim; d += 2)
        for (int p = 0; p < PAGE_SIZE; p += 8) {
            lanes scale;
            for (int i = 0; i < LANES; i++) scale[i] = scales[p + i / 2];
            store_rounded(to + d * PAGE_SIZE + p * 2, load_signed(keys + (d * PAGE_SIZE + p * 2)) * scale);
        }
    for (int64_t p = 0; p < PAGE_SIZE; p += 2) {
        lanes scale;
        for (int i = 0; i < LANES; i++) scale[i] = scales[PAGE_SIZE + p + i % 2];
        for (int64_t i = 0; i < 2 * dim; i += LANES) {
            store_rounded(wide_values + p * dim + i, load_signed(values + p * dim + i) * scale);
        }
    }
}

/* Return the first position of the first page with a position that a query of the tile sees. */
static int64_t first_seen(int64_t window, const tile *t) {
    int64_t first = t->position - window + 1;
    return first < 0 ? 0 : first / PAGE_SIZE * PAGE_SIZE;
}

/* Compute the weights of one query for the positions of a page, and update the peak of the query's softmax `s`. Only
 * the positions [visible_begin, visible_end) of the page get a weight. Write the sum of the weights to `added_up`.
 * Return the factor for the sums of earlier pages, as an exponent of two. */
INLINE float weights_of(const float *scores, float scale, int32_t visible_begin, int32_t visible_end, state *s,
                        float *added_up, bfloat16 *weights) {
    const int masked = visible_end < PAGE_SIZE || visible_begin > 0;
    lanes score[4], peak = all(s->peak), added = {0};
    words counts[4];
    for (int i = 0; i < 4; i++) {
        score[i] = load(scores + LANES * i) * scale;
        counts[i] = (INDICES < visible_end - LANES * i) & (INDICES >= visible_begin - LANES * i);
        if (masked) score[i] = where(counts[i], score[i], all(-INFINITY));
        peak = larger(peak, score[i]);
    }
    float previous = s->peak, most = s->peak = largest(peak);
    for (int i = 0; i < 4; i++) {
        lanes weight = power_of_two(score[i] - most);
        if (masked) weight = where(counts[i], weight, (lanes){0});
        added += weight;
        store_rounded(weights + LANES * i, weight);
    }
    *added_up = sum(added);
    return previous - most;
}

/* Compute attention to the positions [from, to) for the queries of one tile and one KV head. Overwrites `states` and
 * `sums`. */
static void attend_segment(const attend_arguments *a, const tile *t, int64_t kv_head, int64_t from, int64_t to,
                        state *states, float *sums) {
    static __thread float scores[MAX_QUERIES][PAGE_SIZE] __attribute__((aligned(64)));
    static __thread bfloat16 weights[MAX_QUERIES][PAGE_SIZE] __attribute__((aligned(64)));
    static __thread bfloat16 wide[2 * PAGE_SIZE * MAX_DIM] __attribute__((aligned(64)));
    int64_t group = a->heads / a->kv_heads, dim = a->dim, window = a->window, first = first_seen(window, t);
    float scale = a->scale * LOG2_E; /* scores become exponents of two */
    const bfloat16 *queries[MAX_QUERIES];
    float keep[MAX_QUERIES] = {0}, added_up[MAX_QUERIES];
    for (int q = 0; q < t->rows * group; q++) {
        queries[q] = a->queries + ((t->row + q / group) * a->heads + kv_head * group + q % group) * dim;
        states[q] = (state){-INFINITY, 0};
    }
    memset(sums, 0, t->rows * group * dim * sizeof *sums);
    int64_t bytes = a->narrow ? 2 * PAGE_SIZE * dim + 2 * PAGE_SIZE * 4 : 4 * PAGE_SIZE * dim;
    for (int64_t start = from > first ? from : first; start < to; start += PAGE_SIZE) {
        int64_t page = a->page_numbers[t->pages + start / PAGE_SIZE];
        const uint8_t *block = a->cache + (page * a->kv_heads + kv_head) * bytes;
        const bfloat16 *keys = (const bfloat16 *)block;
        if (a->narrow) widen(block, dim, wide), keys = wide;
        /* Skip rows that see no position of this page: rows before the page, and rows whose window begins after it. */
        int64_t skip = start - t->position, rows = start + PAGE_SIZE + window - 1 - t->position;
        if (skip < 0 || t->seen) skip = 0;
        if (rows > t->rows) rows = t->rows;
        int64_t visible = (t->seen ? t->seen : t->position + rows) - start;
        if (visible > PAGE_SIZE) visible = PAGE_SIZE;
        int begin = (int)(skip * group), end = (int)(rows * group), count = end - begin;
        score(queries + begin, keys, dim, scores + begin, count, visible);
        for (int q = begin; q < end; q++) {
            int64_t own_end = t->position + q / group + 1 - start, visible_begin = own_end - window;
            int64_t visible_end = t->seen ? t->seen - start : own_end;
            keep[q] = weights_of(scores[q], scale, visible_begin < 0 ? 0 : (int32_t)visible_begin,
                                 visible_end > PAGE_SIZE ? PAGE_SIZE : (int32_t)visible_end, states + q, added_up + q,
                                 weights[q]);
        }
        for (int q = begin / LANES * LANES; q < end; q += LANES) store(keep + q, power_of_two(load(keep + q)));
        for (int q = begin; q < end; q++) states[q].total = states[q].total * keep[q] + added_up[q];
        weigh(weights + begin, keys + PAGE_SIZE * dim, dim, sums + begin * dim, keep + begin, count, visible);
    }
}

/* Merge the result `from` of a range of positions into the result `into` of an earlier range. */
static void merge(state *into, float *sums, const state *from, const float *more, int64_t dim) {
    if (from->peak == -INFINITY) return;
    if (into->peak == -INFINITY) {
        *into = *from;
        memcpy(sums, more, dim * sizeof *sums);
        return;
    }
    float most = into->peak > from->peak ? into->peak : from->peak;
    float keep = power_of_two(all(into->peak - most))[0], share = power_of_two(all(from->peak - most))[0];
    *into = (state){most, fmaf(from->total, share, into->total * keep)};
    for (int64_t i = 0; i < dim; i += LANES)
        store(sums + i, fused(load(more + i), all(share), load(sums + i) * keep));
}

/* Divide the sums by the total of the softmax. An attention sink is an additional score that has no value vector. */
static void finish(float *out, const state *s, const float *sums, int64_t dim, const float *sink) {
    float keep = 1.0f, total = s->total;
    if (sink) {
        float score = *sink * LOG2_E, most = score > s->peak ? score : s->peak;
        keep = power_of_two(all(s->peak - most))[0];
        total = total * keep + power_of_two(all(score - most))[0];
    }
    lanes inverse = all(keep / total);
    for (int64_t i = 0; i < dim; i += LANES) store(out + i, load(sums + i) * inverse);
}

/* One item per tile and KV head. */
KERNEL(attend, item) {
    if (item < 0) return *a->tile_count * a->kv_heads;
    const tile *t = a->tiles + item / a->kv_heads;
    int64_t kv_head = item % a->kv_heads, group = a->heads / a->kv_heads, dim = a->dim;
    static __thread float sums[MAX_QUERIES * MAX_DIM] __attribute__((aligned(64)));
    static __thread float all_sums[MAX_QUERIES * MAX_DIM] __attribute__((aligned(64)));
    state states[MAX_QUERIES], all_states[MAX_QUERIES];
    int count = (int)(t->rows * group);
    int64_t end = t->seen ? t->seen : t->position + t->rows, first = first_seen(a->window, t) / SEGMENT_POSITIONS;
    for (int q = 0; q < count; q++) all_states[q] = (state){-INFINITY, 0};
    for (int64_t segment = t->first_segment; segment < t->first_segment + t->segments; segment++) {
        if (t->partial < 0 && segment < first) continue;
        int64_t from = segment * SEGMENT_POSITIONS;
        int64_t to = from + SEGMENT_POSITIONS < end ? from + SEGMENT_POSITIONS : end;
        attend_segment(a, t, kv_head, from, to, states, sums);
        for (int q = 0; q < count; q++) {
            if (t->partial < 0) {
                merge(all_states + q, all_sums + q * dim, states + q, sums + q * dim, dim);
                continue;
            }
            int64_t row = (t->partial + segment - t->first_segment) * a->heads + kv_head * group + q;
            memcpy(a->partials + row * (2 + dim), states + q, sizeof *states);
            memcpy(a->partials + row * (2 + dim) + 2, sums + q * dim, dim * sizeof(float));
        }
    }
    for (int q = 0; t->partial < 0 && q < count; q++) {
        int64_t head = kv_head * group + q % group;
        finish(a->out + ((t->row + q / group) * a->heads + head) * dim, all_states + q, all_sums + q * dim, dim,
               a->sinks ? a->sinks + head : NULL);
    }
    return 0;
}

KERNEL(combine, item) {
    if (item < 0) return *a->split_count;
    const split *row = a->splits + item;
    int64_t heads = a->heads, dim = a->dim;
    for (int64_t head = 0; head < heads; head++) {
        float sums[MAX_DIM];
        state s = {-INFINITY, 0}, more;
        for (int64_t segment = 0; segment < row->segments; segment++) {
            const float *from = a->partials + ((row->partial + segment) * heads + head) * (2 + dim);
            memcpy(&more, from, sizeof more);
            merge(&s, sums, &more, from + 2, dim);
        }
        finish(a->out + (row->row * heads + head) * dim, &s, sums, dim, a->sinks ? a->sinks + head : NULL);
    }
    return 0;
}
