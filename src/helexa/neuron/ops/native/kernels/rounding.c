/* Rounding of activations to codes of 16 or 8 bits, with one scale per 32 columns.
 *
 * With mixed rounding, the scale of a group fits all its numbers into 8 bits, unless one of them is TOO_LARGE times the
 * mean magnitude of the row: it would force a coarse scale on the 31 other columns. The scale then fits the numbers up
 * to FITTED times the mean into 8 bits, and larger numbers (outliers) need upper bytes. With a single limit, numbers
 * slightly above it would need upper bytes, too, which cost more time than a slightly coarser scale costs precision. */
#include "blocks.h"
#include "graph.h"

#define FITTED 3.5f    /* see above; multiples of the row's mean magnitude */
#define TOO_LARGE 7.0f
#define SAMPLED 4      /* the mean magnitude of a row is computed from every fourth group */
#define ROWS_AHEAD 2   /* a row is prefetched when the row this many rows before it is rounded */
#define MOST_8 127.0f
#define MOST_16 (127 * 256 + 127.0f)

INLINE lanes activation(const float *from, int64_t width, const int gate) {
    return gate ? gated(load(from), gate) * load(from + width) : load(from);
}

/* Return the magnitude up to which a scale fits the numbers of a group with outliers into 8 bits. */
INLINE float fitted_size(const float *from, int64_t groups, const int gate) {
    lanes total = {0};
    int64_t count = 0;
    for (int64_t g = 0; g < groups; g += SAMPLED, count += GROUP)
        for (int64_t i = 0; i < GROUP; i += LANES)
            total += (lanes)((bits)activation(from + g * GROUP + i, groups * GROUP, gate) & 0x7fffffff);
    return FITTED * sum(total) / (float)count;
}

#if defined(VNNI) && defined(__AVX512BW__) && defined(__AVX512VL__)
/* With AVX-512, LANES groups of a row are rounded at once. Rounding one group would mostly wait for its largest
 * magnitude and its sums. */
#define AT_ONCE 512 /* groups of a row whose scales and gated activations are stored */

/* Prefetch 16 numbers into the L2 cache. The processor itself prefetches too few numbers, above all if a gate makes
 * rows with two halves. */
INLINE void prefetch_numbers(const float *at) { __builtin_prefetch(at, 0, 2); }

/* For each group: its scale and the inverse of the scale; `finite`, which is -1, or 0 if a number is infinite or NaN;
 * and `large`, the marks of large codes (see LARGE). */
typedef struct {
    float scale[AT_ONCE], inverse[AT_ONCE];
    int32_t finite[AT_ONCE], large[AT_ONCE];
} scales;

/* Compute the scales of `count` groups from group `first` on, at most LANES. A scale fits all numbers of its group into
 * codes of 8 bits, or only those up to `limit` if the group has much larger ones. If `limit` is negative, it fits all
 * numbers into 16 bits. It is NaN if any number is infinite or NaN. Prefetch the numbers that are `ahead` numbers
 * further. */
INLINE void find_scales(scales *s, const float *from, int64_t first, int64_t count, float limit, int64_t ahead) {
    lanes sizes[LANES];
    for (int64_t g = 0; g < count; g++) {
        const float *at = from + (first + g) * GROUP;
        prefetch_numbers(at + ahead), prefetch_numbers(at + ahead + LANES);
        sizes[g] = larger_size((lanes)(load_bits(at) & 0x7fffffff), load(at + LANES));
    }
    /* `off` is NaN if a number is infinite or NaN, else 0. */
    lanes peak = largest_size_each(sizes), off = peak - peak, scale = peak * (1 / MOST_16);
    if (limit >= 0) {
        lanes narrow = where(peak < limit * (TOO_LARGE / FITTED), peak, all(limit)) * (1 / MOST_8);
        scale = where(narrow > scale, narrow, scale);
    }
    words finite = off == 0.0f;
    lanes inverse = where(peak > 1e-30f, 1 / scale, (lanes){0}), most = peak * inverse;
    words large = ((most >= LARGE_CODE(5)) & LARGE(5)) | ((most >= LARGE_CODE(6)) & LARGE(6));
    store(s->scale + first, scale + off);
    store(s->inverse + first, inverse);
    memcpy(s->finite + first, &finite, sizeof finite);
    memcpy(s->large + first, &large, sizeof large);
}

/* Return the lower bytes of the codes of a group, followed by the upper bytes. In the vector `codes`, quads of the
 * first half of the group alternate with quads of the second half. */
INLINE __m512i split_codes(__m512i codes) {
    const __m512i shifted = _mm512_add_epi16(codes, _mm512_set1_epi16(128));
#ifdef __AVX512VBMI__
#define QUAD(first) first, first + 2, first + 4, first + 6
#define HALVES(first) QUAD(first), QUAD(first + 16), QUAD(first + 32), QUAD(first + 48)
    static const uint8_t order[] = {HALVES(0), HALVES(8), HALVES(65), HALVES(73)};
    return _mm512_permutex2var_epi8(codes, _mm512_loadu_si512(order), shifted);
#else
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i lower = _mm512_and_si512(codes, _mm512_set1_epi16(255)), upper = _mm512_srli_epi16(shifted, 8);
    return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(lower, upper));
#endif
}

/* Round `count` groups from group `first` on, at most LANES. Consecutive groups are `stride` bytes apart. */
INLINE void round_groups(place to, int64_t stride, const scales *s, const float *from, int64_t first, int64_t count) {
    __m512i sums[LANES];
    from += first * GROUP, to = place_after(to, first * stride);
    place next = to;
    for (int64_t g = 0; g < count; g++, from += GROUP, next = place_after(next, stride)) {
        float inverse = s->inverse[first + g];
        __m512 low = (__m512)((lanes)((words)load(from) & s->finite[first + g]) * inverse);
        __m512 high = (__m512)((lanes)((words)load(from + LANES) & s->finite[first + g]) * inverse);
        /* The conversion rounds to the nearest integer, and every code fits in 16 bits. */
        __m512i codes = _mm512_packs_epi32(_mm512_cvtps_epi32(low), _mm512_cvtps_epi32(high));
        __m512i bytes = split_codes(codes);
        __m256i lower = _mm512_castsi512_si256(bytes), upper = _mm512_extracti64x4_epi64(bytes, 1);
        int32_t quads = _mm256_test_epi32_mask(upper, upper) | s->large[first + g];
        sums[g] = _mm512_madd_epi16(codes, _mm512_set1_epi16(1));
        memcpy(next.codes[0], &lower, sizeof lower), memcpy(next.codes[1], &upper, sizeof upper);
        memcpy(next.fields + 4 * next.step, &quads, sizeof quads);
    }
    /* Part i of `pairs[k]` has the sums of both halves of the groups 4 i + 2 k and 4 i + 2 k + 1, and part i of
     * `fields[j]` has the fields of the group 4 i + j. */
    COMBINE_PARTS(four, sums, SUM_OF_WORDS)
    __m512 pairs[2], fields[4];
    for (int k = 0; k < 2; k++) {
        __m512 a = four[2 * k], b = four[2 * k + 1];
        pairs[k] = SUM_OF_WORDS(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    }
    __m512 even = _mm512_shuffle_ps(pairs[0], pairs[1], 0x88), odd = _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd);
    __m512i totals = (__m512i)SUM_OF_WORDS(even, odd);
    __m512 scale = (__m512)load(s->scale + first), scaled_sum = scale * _mm512_cvtepi32_ps(totals);
    for (int k = 0; k < 2; k++) {
        __m512d a = (__m512d)(k ? _mm512_unpackhi_ps(scale, scaled_sum) : _mm512_unpacklo_ps(scale, scaled_sum));
        __m512d b = (__m512d)((words)pairs[k] * -32);
        fields[2 * k] = (__m512)_mm512_unpacklo_pd(a, b), fields[2 * k + 1] = (__m512)_mm512_unpackhi_pd(a, b);
    }
    for (int64_t g = 0; g < count; g++, to = place_after(to, stride))
        for (int i = 0; i < 4; i++) memcpy(to.fields + i * to.step, (float *)(fields + g % 4) + g / 4 * 4 + i, 4);
}

/* Round the row `r` of a panel of `rows` rows, in the layout of AMX if `amx` is set. Prefetch a later row, whose
 * numbers are `ahead` numbers further. */
INLINE void round_row(block *panel, const float *from, int64_t groups, int64_t rows, int64_t r, int amx, const int gate,
                      int64_t x_bits, int64_t ahead) {
    float limit = x_bits == 16 ? -1.0f : __FLT_MAX__, values[AT_ONCE * GROUP];
    place to = amx ? place_of_row((uint8_t *)panel, rows, r) : place_of_block(panel + r);
    const int64_t stride = rows * BLOCK_BYTES, width = groups * GROUP;
    for (int64_t g = 0; g < groups; g += AT_ONCE, to = place_after(to, AT_ONCE * stride)) {
        int64_t count = groups - g < AT_ONCE ? groups - g : AT_ONCE;
        const float *numbers = from + g * GROUP;
        if (gate) {
            for (int64_t i = 0; i < count * GROUP; i += LANES) {
                prefetch_numbers(numbers + ahead + i), prefetch_numbers(numbers + ahead + width + i);
                store(values + i, activation(numbers + i, width, gate));
            }
            numbers = values;
        }
        if (x_bits == MIXED && g == 0)
            limit = count == groups ? fitted_size(numbers, groups, 0) : fitted_size(from, groups, gate);
        scales s; /* all scales are computed first, because the codes of a group wait for its scale */
        for (int64_t i = 0; i < count; i += LANES)
            find_scales(&s, numbers, i, count - i < LANES ? count - i : LANES, limit, gate ? 0 : ahead);
        for (int64_t i = 0; i < count; i += LANES)
            round_groups(to, stride, &s, numbers, i, count - i < LANES ? count - i : LANES);
    }
}
#else
/* Round 32 numbers with a scale as in `find_scales`: it fits all numbers into codes of 8 bits, or only those up to
 * `limit` if others are much larger, or all numbers into 16 bits if `limit` is negative. The scale is NaN if any number
 * is infinite or NaN. */
INLINE void round_group(place to, lanes low, lanes high, float limit) {
    /* `off` is NaN if a number is infinite or NaN, else 0. */
    float peak = largest_size(low, high), off = peak - peak, scale = peak * (1 / MOST_16);
    if (off != 0.0f) low = high = (lanes){0};
    if (limit >= 0 && peak > 0) {
        float narrow = (peak < limit * (TOO_LARGE / FITTED) ? peak : limit) * (1 / MOST_8);
        scale = narrow > scale ? narrow : scale;
    }
    float inverse = peak > 1e-30f ? 1 / scale : 0.0f;
    lanes values[2] = {low * inverse, high * inverse};
    int32_t sums[2], upper = 0;
    for (int half = 0; half < 2; half++) {
        /* Adding 1.5 * 2^23 rounds to an integer in the low bits. */
        words codes = (words)(values[half] + ROUNDER) - 0x4b400000;
#if defined(VNNI)
        words uppers = (codes + 128) >> 8;
        bytes16 narrow[PARTS] = {__builtin_convertvector(codes - (uppers << 8), bytes16),
                                 __builtin_convertvector(uppers, bytes16)};
        for (int part = 0; part < PARTS; part++)
            memcpy(to.codes[part] + half * QUADS / 2, narrow + part, sizeof *narrow);
        upper |= nonzero(narrow + 1) << (half * QUADS / 2);
#else
        uint64_t twos[QUADS], low = 0x0000ffff0000ffff;
        memcpy(twos, &codes, sizeof twos);
        for (int q = 0; q < QUADS / 2; q++) {
            uint64_t four = (twos[2 * q] & low) | (twos[2 * q + 1] & low) << 16;
            memcpy(to.codes[0] + half * QUADS / 2 + q, &four, sizeof four);
        }
#endif
        sums[half] = sum_words(codes);
    }
    for (int bits = 5; PARTS > 1 && bits <= 6; bits++) upper |= peak * inverse >= LARGE_CODE(bits) ? LARGE(bits) : 0;
    scale += off;
    float scaled_sum = scale * (float)(sums[0] + sums[1]);
    int32_t numbers[] = {-32 * sums[0], -32 * sums[1], upper};
    memcpy(to.fields, &scale, 4), memcpy(to.fields + to.step, &scaled_sum, 4);
    for (int i = 0; i < 3; i++) memcpy(to.fields + (2 + i) * to.step, numbers + i, 4);
}

/* Round the row `r` of a panel of `rows` rows, in the layout of AMX if `amx` is set. */
INLINE void round_row(block *panel, const float *from, int64_t groups, int64_t rows, int64_t r, int amx, const int gate,
                      int64_t x_bits, int64_t ahead) {
    (void)ahead;
    float limit = x_bits == 16 ? -1.0f : __FLT_MAX__;
    if (x_bits == MIXED) limit = fitted_size(from, groups, gate);
    for (int64_t g = 0; g < groups; g++, panel += rows, from += GROUP) {
        lanes low = activation(from, groups * GROUP, gate), high = activation(from + LANES, groups * GROUP, gate);
        round_group(amx ? place_of_row((uint8_t *)panel, rows, r) : place_of_block(panel + r), low, high, limit);
    }
}
#endif

/* Round rows to blocks, in the order of panels (see blocks.h). An item is a panel: two threads that round rows of one
 * panel would write to the same cache lines. */
KERNEL(quantize, item) {
    int64_t rows = a->rows, columns = a->columns, gate = a->gate, groups = columns / GROUP;
    const int amx = has_amx_panels(rows);
    if (item < 0) return amx ? (rows + AMX_ROWS - 1) / AMX_ROWS : panel_count(rows);
    int64_t start = item * (amx ? AMX_ROWS : PANEL_ROWS), together = rows_of_panel(start, rows);
    block *panel = (block *)a->out + start * groups;
    int64_t width = columns * (gate ? 2 : 1);
    for (int64_t r = 0; r < together; r++) {
        const float *from = a->x + (start + r) * width;
        int64_t ahead = start + r + ROWS_AHEAD < rows ? ROWS_AHEAD * width : 0;
#define ROUND(GATE) \
    if (gate == GATE) round_row(panel, from, groups, together, r, amx, GATE, a->x_bits, ahead);
        ROUND(0) ROUND(SILU) ROUND(GELU_TANH)
    }
    return 0;
}
