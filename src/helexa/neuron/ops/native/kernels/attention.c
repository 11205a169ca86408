/* Causal attention over the paged KV cache, and attention without a mask within frames. A tile of queries reads the KV
 * pages of its sequence one after another, and rescales its softmax after each page. A segment is SEGMENT_POSITIONS
 * positions. The result of each segment is merged into the result of the earlier segments. Pages and segments begin at
 * fixed positions, and masked positions add nothing. The result of a row therefore does not depend on the other rows of
 * the tile, or on whether one item or several items compute the segments. */
#include "byte_pages.h"
#include "graph.h"
#include "page_products.h"

/* Softmax over some positions: total = sum of 2^(score - peak). A peak of -inf means no positions yet. */
typedef struct {
    float peak, total;
} state;

/* Return the first position of the first page with a position that a query of the tile sees. */
static int64_t first_seen(int64_t window, const tile *t) {
    int64_t first = t->position - window + 1;
    return first < 0 ? 0 : first / PAGE_SIZE * PAGE_SIZE;
}

/* Return the number of bytes of the keys of one KV head in a page. The values have the same size. */
INLINE int64_t key_bytes(const attend_arguments *a) { return PAGE_SIZE * a->dim * (a->narrow ? 1 : 2); }

/* Rearrange the keys [dim / 2, PAGE_SIZE, 2] of a page as values [PAGE_SIZE / 2, dim, 2], at least for the first
 * `visible` positions. */
INLINE void values_from_keys(const uint8_t *keys, int64_t dim, int64_t visible, uint8_t *values) {
    for (int64_t position = 0; position < visible; position += LANES)
        for (int64_t d = 0; d < dim; d += 2 * LANES) {
            bits m[LANES]; /* a word has two numbers of a position */
            for (int i = 0; i < LANES; i++) m[i] = load_bits(keys + 4 * ((d / 2 + i) * PAGE_SIZE + position));
            transpose(m);
            for (int i = 0; i < LANES; i += 2) {
                bits even = (m[i] & 0xffff) | m[i + 1] << 16, odd = m[i] >> 16 | (m[i + 1] & 0xffff0000);
                bits first = MIX(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                bits second = MIX(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
                uint8_t *to = values + 4 * ((position + i) / 2 * dim + d);
                memcpy(to, &first, sizeof first), memcpy(to + sizeof first, &second, sizeof second);
            }
        }
}

/* Return the keys of one KV head in the page with the position `position` of a tile's sequence. The values follow the
 * keys. The scales and the base of an 8-bit cache follow the values. */
INLINE const uint8_t *keys_of(const attend_arguments *a, const tile *t, int64_t kv_head, int64_t position) {
    int64_t page = a->page_numbers[t->pages + position / PAGE_SIZE];
    int64_t more = a->narrow ? 3 * PAGE_SIZE * (int64_t)sizeof(float) + a->dim * (int64_t)sizeof(bfloat16) : 0;
    return a->cache + (page * a->cached_heads + kv_head * a->cached_heads / a->kv_heads) * ((a->keys_only ? 1 : 2) * key_bytes(a) + more);
}

/* Return the keys that the item `item` of `attend` reads first. */
static const uint8_t *first_keys(const attend_arguments *a, int64_t item) {
    const tile *t = a->tiles + item / a->kv_heads;
    int64_t first = first_seen(a->window, t), from = t->first_segment * SEGMENT_POSITIONS;
    return keys_of(a, t, item % a->kv_heads, from > first ? from : first);
}

/* The queries of a tile and one KV head in the type of the cache, and their work on one page. */
typedef union {
    uint16_t rounded[MAX_QUERIES * QUERY_STRIDE] __attribute__((aligned(64)));
    byte_queries bytes;
} tile_queries;
typedef union {
    page_work rounded;
    byte_work bytes;
} tile_work;

static void load_queries(const attend_arguments *a, const tile *t, int64_t kv_head, tile_queries *to) {
    int64_t group = a->heads / a->kv_heads, dim = a->dim;
    for (int64_t q = 0; q < t->rows * group; q++) {
        int64_t from = ((t->row + q / group) * a->heads + kv_head * group + q % group) * dim;
        if (a->narrow) load_byte_query((const float *)a->queries + from, dim, &to->bytes, q);
        else memcpy(to->rounded + q * QUERY_STRIDE, (const bfloat16 *)a->queries + from, dim * sizeof(bfloat16));
    }
}

/* The positions [begin, end) of a page that a row sees. */
typedef struct {
    int32_t begin, end;
} range;

INLINE int all_of(range seen) { return seen.begin == 0 && seen.end == PAGE_SIZE; }

/* Return the positions that the row `row` of a tile sees of the page that begins at position `start`. */
INLINE range seen_by(const attend_arguments *a, const tile *t, int64_t row, int64_t start) {
    int64_t own = t->position + row + 1 - start, seen = t->seen ? t->seen - start : own;
    return (range){own > a->window ? (int32_t)(own - a->window) : 0, seen > PAGE_SIZE ? PAGE_SIZE : (int32_t)seen};
}

/* Apply the soft cap to the scores of the queries [begin, end) of a page, which are not multiplied by the scale yet. */
static void cap_scores(const attend_arguments *a, page_work *page, int begin, int end) {
    for (int q = begin; q < end; q++)
        for (float *score = page->scores[q]; score < page->scores[q] + PAGE_SIZE; score += LANES)
            store(score, soft_capped(load(score), a->cap / a->scale));
}

/* Apply the soft cap to the scores of the queries [begin, end) of an 8-bit page, which are exponents of two. The cap
 * does not apply to the logarithm of the value's scale, which a score includes. The cap applies to the product with the
 * base, so the function adds this product to the scores and then sets it to 0. */
static void cap_byte_scores(const attend_arguments *a, byte_work *page, const float *logarithms, int begin, int end) {
    for (int q = begin; q < end; q++) {
        lanes base = all(page->base[q] * a->scale * LOG2_E);
        for (int i = 0; i < PAGE_SIZE; i += LANES) {
            lanes more = load(logarithms + i), score = load(page->scores[q] + i) - more + base;
            store(page->scores[q] + i, soft_capped(score, a->cap * LOG2_E) + more);
        }
        page->base[q] = 0;
    }
}

/* Attend to one page of bfloat16 numbers for the rows [skip, rows) of a tile. */
INLINE void attend_page(const attend_arguments *a, const tile *t, const tile_queries *queries, int64_t start,
                        const uint8_t *keys, const uint8_t *ahead, int64_t skip, int64_t rows, int64_t visible,
                        page_work *page, state *states, float *sums) {
    const int group = (int)(a->heads / a->kv_heads), begin = (int)skip * group, end = (int)rows * group;
    const int64_t dim = a->dim, values = key_bytes(a);
    const float scale = a->scale * LOG2_E; /* scores become exponents of two */
    float totals[MAX_QUERIES];
    score(queries->rounded + begin * QUERY_STRIDE, keys, ahead, dim, page->scores + begin, end - begin, visible);
    if (a->cap > 0) cap_scores(a, page, begin, end);
    for (int q = begin; q < end;) {
        range seen = seen_by(a, t, q / group, start);
        for (int last = q + group; q < last; q++)
            totals[q] = all_of(seen) ? weights_of(page, q, scale, 0, PAGE_SIZE, &states[q].peak, 0)
                                     : weights_of(page, q, scale, seen.begin, seen.end, &states[q].peak, 1);
    }
    for (int q = begin / LANES * LANES; q < end; q += LANES)
        store(page->keep + q, power_of_two(load(page->keep + q)));
    for (int q = begin; q < end; q++) states[q].total = states[q].total * page->keep[q] + totals[q];
    static __thread uint8_t rearranged[2 * PAGE_SIZE * MAX_DIM] __attribute__((aligned(64)));
    if (a->keys_only) values_from_keys(keys, dim, visible, rearranged);
    weigh(page->weights[begin], a->keys_only ? rearranged : keys + values, a->keys_only ? ahead : ahead + values, dim,
          sums + begin * dim, page->keep + begin, end - begin, visible);
}

/* Attend to one page of 8-bit integers. The largest scores of all queries are computed before their weights, so that
 * the processor overlaps the work on several queries. */
INLINE void attend_byte_page(const attend_arguments *a, const tile *t, const tile_queries *queries, int64_t start,
                             const uint8_t *keys, const uint8_t *ahead, int64_t skip, int64_t rows, int64_t visible,
                             byte_work *page, float *sums) {
    const int group = (int)(a->heads / a->kv_heads), begin = (int)skip * group, end = (int)rows * group;
    const int64_t dim = a->dim, values = key_bytes(a), more = 3 * PAGE_SIZE * sizeof(float) + dim * sizeof(bfloat16);
    const float *scales = (const float *)(keys + 2 * values), *inverses = scales + 2 * PAGE_SIZE;
    const float scale = a->scale * LOG2_E; /* scores become exponents of two */
    prefetch_bytes(ahead + 2 * values, more);
    base_scores(&queries->bytes, (const bfloat16 *)(scales + 3 * PAGE_SIZE), dim, end, page->base);
    score_bytes(&queries->bytes, scale, keys, scales, ahead, dim, page, begin, end, visible);
    if (a->cap > 0) cap_byte_scores(a, page, scales + PAGE_SIZE, begin, end);
    for (int q = begin; q < end;) {
        range seen = seen_by(a, t, q / group, start);
        for (int last = q + group; q < last; q++)
            if (all_of(seen)) largest_scores(page, q, 0, PAGE_SIZE, 0);
            else largest_scores(page, q, seen.begin, seen.end, 1);
    }
    update_peaks(page, scale, begin, end);
    for (int q = begin; q < end;) {
        range seen = seen_by(a, t, q / group, start);
        for (int last = q + group; q < last; q++)
            if (all_of(seen)) weights_from(page, q, inverses, 0, PAGE_SIZE, 0);
            else weights_from(page, q, inverses, seen.begin, seen.end, 1);
    }
    update_totals(page, begin, end);
    weigh_bytes(page, keys + values, ahead + values, dim, sums, begin, end, visible);
}

/* Compute attention to the positions [from, to) for the queries of one tile and one KV head. Overwrites `states` and
 * `sums`. Prefetch `next`, the keys that this thread reads after these positions. */
INLINE void attend_segment(const attend_arguments *a, const tile *t, const tile_queries *queries, int64_t kv_head,
                           int64_t from, int64_t to, const uint8_t *next, state *states, float *sums,
                           const int narrow) {
    static __thread tile_work page;
    const int64_t group = a->heads / a->kv_heads, window = a->window, first = first_seen(window, t);
    for (int q = 0; q < t->rows * group; q++) {
        states[q] = (state){-INFINITY, 0};
        if (narrow) page.bytes.peaks[q] = -INFINITY, page.bytes.totals[q] = 0;
    }
    memset(sums, 0, t->rows * group * a->dim * sizeof *sums);
    for (int64_t start = from > first ? from : first; start < to; start += PAGE_SIZE) {
        const uint8_t *keys = keys_of(a, t, kv_head, start);
        const uint8_t *ahead = start + PAGE_SIZE < to ? keys_of(a, t, kv_head, start + PAGE_SIZE) : next;
        /* Skip rows that see no position of this page: rows before the page, and rows whose window begins after it. */
        int64_t skip = start - t->position, rows = start + PAGE_SIZE + window - 1 - t->position;
        if (skip < 0 || t->seen) skip = 0;
        if (rows > t->rows) rows = t->rows;
        int64_t visible = (t->seen ? t->seen : t->position + rows) - start;
        if (visible > PAGE_SIZE) visible = PAGE_SIZE;
        if (narrow)
            attend_byte_page(a, t, queries, start, keys, ahead, skip, rows, visible, &page.bytes, sums);
        else attend_page(a, t, queries, start, keys, ahead, skip, rows, visible, &page.rounded, states, sums);
    }
    for (int q = 0; narrow && q < t->rows * group; q++)
        states[q] = (state){page.bytes.peaks[q], page.bytes.totals[q]};
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
    static __thread tile_queries queries;
    state states[MAX_QUERIES], all_states[MAX_QUERIES];
    int count = (int)(t->rows * group);
    int64_t end = t->seen ? t->seen : t->position + t->rows, first = first_seen(a->window, t) / SEGMENT_POSITIONS;
    for (int q = 0; q < count; q++) all_states[q] = (state){-INFINITY, 0};
    load_queries(a, t, kv_head, &queries);
    int64_t next_item = item + 1 < *a->tile_count * a->kv_heads ? item + 1 : item;
    for (int64_t segment = t->first_segment, last = segment + t->segments; segment < last; segment++) {
        if (t->partial < 0 && segment < first) continue;
        int64_t from = segment * SEGMENT_POSITIONS;
        int64_t to = from + SEGMENT_POSITIONS < end ? from + SEGMENT_POSITIONS : end;
        const uint8_t *next = segment + 1 < last ? keys_of(a, t, kv_head, to) : first_keys(a, next_item);
        if (a->narrow) attend_segment(a, t, &queries, kv_head, from, to, next, states, sums, 1);
        else attend_segment(a, t, &queries, kv_head, from, to, next, states, sums, 0);
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
