/* Quantization of plain weights into tiles while a model is loaded. Each group of a row gets a scale, and a minimum if
 * the format has minimums. Both are fitted by least squares from several starting points.
 * `weights/quantize.py` does the same in torch.
 *
 * Each lane processes one row, so no sum crosses lanes. */
#include "lanes.h"
#include "graph.h"
#include "tiles.h"

#define STRETCH 256 /* columns processed at once: the columns that share a unit in formats with two scale levels */
#define SCALES 16   /* maximum number of scales of a stretch */
#define ROUNDS 4
#define LARGEST 32768.0f /* larger weights would not fit float16 scales */

/* Starting points: amounts added to the largest magnitude of a code to compute the first scale. */
static const float STEPS[ROUNDS] = {-1.0f, -0.4f, 0.2f, 0.8f};

INLINE slice slice_smaller(slice a, slice b) {
#if defined(__AVX512F__)
    return (slice)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return slice_where(a < b, a, b);
#endif
}

INLINE lanes smaller(lanes a, lanes b) {
    slices x = {a}, y = {b};
    EACH_SLICE x.each[i] = slice_smaller(x.each[i], y.each[i]);
    return x.all;
}

INLINE lanes size_of(lanes x) { return (lanes)((bits)x & 0x7fffffff); }

/* Round to the nearest integer, ties to even, for magnitudes below 2^22. */
INLINE lanes rounded(lanes x) { return (x + ROUNDER) - ROUNDER; }

/* Return 1 / x, or 0 if x is 0. */
INLINE lanes inverse(lanes x) { return where(x == 0.0f, all(0.0f), 1.0f / x); }

/* Convert float16 in the low halves of words to float32, exactly; non-finite numbers become 65536 or more. */
INLINE lanes widened(bits half) { return (lanes)((bits)((lanes)((half & 0x7fff) << 13) * 0x1p112f) | (half & 0x8000) << 16); }

/* Convert to float16, rounded to nearest, ties to even; infinite if out of range. */
INLINE bits narrowed(lanes value) {
    bits sign = ((bits)value >> 16) & 0x8000, size = (bits)value & 0x7fffffff;
    bits small = (bits)((lanes)size + 0.5f) - 0x3f000000; /* the sum rounds at the last bit of a subnormal number */
    bits rounded = (size + 0xc8000fff + ((size >> 13) & 1)) >> 13;
    words is_small = size < 0x38800000, fits = size < 0x477ff000;
    rounded = (rounded & (bits)fits) | (0x7c00 & ~(bits)fits);
    return (small & (bits)is_small) | (rounded & ~(bits)is_small) | sign;
}

/* Write float16[16]; return the written values as float32. */
INLINE lanes put_halves(uint8_t *to, lanes value) {
    halves half = __builtin_convertvector(narrowed(value), halves);
    memcpy(to, &half, sizeof half);
    return load_half(to);
}

/* Write the low byte of each lane. */
INLINE void put_bytes(uint8_t *to, words value) {
    bytes16 low = __builtin_convertvector((bits)value & 255, bytes16);
    memcpy(to, &low, sizeof low);
}

/* Load `width` columns of up to 16 rows into one vector per column, with one row per lane. The rows are `stride` bytes
 * apart. Lanes after the last row repeat the last row. Return whether all numbers are finite and small enough. */
INLINE int gather(lanes *x, const uint8_t *from, int64_t width, int64_t stride, int64_t rows, const int source) {
    const int64_t step = source == FLOAT32 ? 16 : 32; /* columns in 64 bytes */
    lanes peak = {0}, total = {0};
    for (int64_t k = 0; k < width; k += step, from += 64) {
        bits m[LANES];
        for (int64_t row = 0; row < LANES; row++) m[row] = load_bits(from + (row < rows ? row : rows - 1) * stride);
        transpose(m);
        for (int i = 0; i < LANES; i++) {
            if (source == FLOAT32) x[k + i] = (lanes)m[i];
            if (source == FLOAT16) x[k + 2 * i] = widened(m[i] & 0xffff), x[k + 2 * i + 1] = widened(m[i] >> 16);
            if (source == BFLOAT16) x[k + 2 * i] = (lanes)(m[i] << 16), x[k + 2 * i + 1] = (lanes)(m[i] & 0xffff0000u);
        }
        for (int64_t i = k; i < k + step; i++) peak = larger(peak, size_of(x[i])), total += x[i];
    }
    words finite = (peak <= LARGEST) & (total == total); /* NaN changes the sum but not the maximum */
    for (int lane = 0; lane < LANES; lane++)
        if (!finite[lane]) return 0;
    return 1;
}

static int gather_any(lanes *x, const uint8_t *from, int64_t width, int64_t stride, int64_t rows, int64_t source) {
    if (source == BFLOAT16) return gather(x, from, width, stride, rows, BFLOAT16);
    if (source == FLOAT16) return gather(x, from, width, stride, rows, FLOAT16);
    return gather(x, from, width, stride, rows, FLOAT32);
}

/* Fit the scale and the minimum (at most 0) of a group of 32 numbers to codes from 0 to `most`. */
static void fit_line(const lanes *x, float most, lanes *scale, lanes *minimum) {
    lanes low = {0}, high = x[0], total = {0}, best = {0};
    for (int i = 0; i < GROUP; i++) low = smaller(low, x[i]), high = larger(high, x[i]), total += x[i];
    lanes slope = inverse(high - low);
    *scale = (lanes){0}, *minimum = low;
    for (int round = 0; round < ROUNDS; round++) {
        lanes factor = slope * (most + STEPS[round]), shift = -low * factor;
        lanes sum_l = {0}, sum_ll = {0}, sum_lx = {0};
#pragma GCC unroll 32
        for (int i = 0; i < GROUP; i++) {
            lanes code = rounded(smaller(fused(x[i], factor, shift), all(most)));
            sum_l += code, sum_ll = fused(code, code, sum_ll), sum_lx = fused(code, x[i], sum_lx);
        }
        lanes level = inverse((float)GROUP * sum_ll - sum_l * sum_l);
        lanes m = (sum_ll * total - sum_l * sum_lx) * level;
        lanes s = ((float)GROUP * sum_lx - total * sum_l) * level;
        words through = (m > 0.0f) | ((level == 0.0f) & (sum_ll > 0.0f)); /* lanes whose line must go through 0 */
        m = where(through, all(0.0f), m);
        s = where(through, larger(sum_lx * inverse(sum_ll), all(0.0f)), s);
        lanes explained = fused(s, sum_lx, m * total); /* part of the sum of squares of x */
        words better = explained > best;
        best = where(better, explained, best), *scale = where(better, s, *scale), *minimum = where(better, m, *minimum);
    }
}

/* Fit the scale, which may be negative, of `n` numbers to codes from -least to least - 1. */
INLINE lanes fit_ray(const lanes *x, const int n, float least) {
    lanes peak = {0}, scale = {0}, best = {0};
    for (int i = 0; i < n; i++) peak = where(size_of(x[i]) > size_of(peak), x[i], peak);
    if (least == 128.0f) return size_of(peak) * (1.0f / 127.0f); /* a search would not improve 8-bit codes */
    lanes slope = -inverse(peak);
    for (int round = 0; round < ROUNDS; round++) {
        lanes factor = slope * (least + STEPS[round]), sum_ll = {0}, sum_lx = {0};
#pragma GCC unroll 32
        for (int i = 0; i < n; i++) {
            lanes code = rounded(larger(smaller(x[i] * factor, all(least - 1.0f)), all(-least)));
            sum_ll = fused(code, code, sum_ll), sum_lx = fused(code, x[i], sum_lx);
        }
        lanes s = sum_lx * inverse(sum_ll), explained = s * sum_lx;
        words better = explained > best;
        best = where(better, explained, best), scale = where(better, s, scale);
    }
    return scale;
}

static void fit_all(const format f, const lanes *x, int64_t count, lanes *scale, lanes *minimum) {
    float levels = (float)(1 << f.bits);
    for (int64_t i = 0; i < count; i++, x += f.group) {
        if (f.minimum)
            fit_line(x, levels - 1.0f, scale + i, minimum + i);
        else
            scale[i] = f.group == 16 ? fit_ray(x, 16, levels / 2) : fit_ray(x, 32, levels / 2);
    }
}

/* Write `count` values as codes times a unit. The value with the largest magnitude gets the code `most`. Replace each
 * value by the product of its code and the unit. */
INLINE void put_multiples(uint8_t *unit, uint8_t *codes, lanes *values, int count, float most) {
    lanes peak = {0};
    for (int i = 0; i < count; i++) peak = where(size_of(values[i]) > size_of(peak), values[i], peak);
    lanes factor = inverse(peak) * most, step = put_halves(unit, peak / most);
    for (int i = 0; i < count; i++) {
        lanes code = rounded(smaller(values[i] * factor, all(most < 0 ? -most - 1.0f : most)));
        put_bytes(codes + i * LANES, __builtin_convertvector(code, words));
        values[i] = code * step;
    }
}

/* Write the scales and minimums of a stretch whose first group is `g`. */
static void put_scales(const format f, uint8_t *tile, int64_t g, int64_t count, lanes *scale, lanes *minimum) {
    if (f.levels == 2) {
        uint8_t *stretch = tile + g / STRETCH_GROUPS * stretch_bytes(f);
        put_multiples(stretch, stretch + 64, scale, (int)count, f.minimum ? 63.0f : -128.0f);
        if (f.minimum) put_multiples(stretch + 32, stretch + 64 + STRETCH_GROUPS * LANES, minimum, (int)count, 63.0f);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        uint8_t *at = (uint8_t *)codes_of(f, tile, g + i) + code_bytes(f);
        scale[i] = put_halves(at, scale[i]);
        if (f.minimum) minimum[i] = put_halves(at + 32, minimum[i]);
    }
}

/* Convert 16 columns to codes, four columns per quad. */
INLINE void encode(bits *quads, const lanes *x, lanes factor, lanes minimum, lanes zero, lanes most) {
    for (int j = 0; j < QUADS / 2; j++) {
        quads[j] = (bits){0};
        for (int i = 0; i < 4; i++) {
            lanes code = smaller(larger(fused(x[4 * j + i] - minimum, factor, zero), all(0.0f)), most);
            quads[j] |= ((bits)(code + ROUNDER) & 255) << (8 * i);
        }
    }
}

/* Write the codes of a group in the layout of a tile. */
static void put_codes(const format f, uint8_t *to, const bits *quads) {
    if (f.bits == 8) {
        memcpy(to, quads, QUADS * sizeof *quads);
        return;
    }
    bits plane[2] = {0};
    for (int j = 0; j < QUADS; j++) {
        if (j < 4) {
            bits both = (quads[j] & 0x0f0f0f0f) | (quads[j + 4] & 0x0f0f0f0f) << 4;
            memcpy(to + 64 * j, &both, sizeof both);
        }
        if (f.bits == 5) plane[0] |= ((quads[j] >> 4) & 0x01010101) << j;
        if (f.bits == 6) plane[j / 4] |= ((quads[j] >> 4) & 0x03030303) << 2 * (j % 4);
    }
    memcpy(to + 256, plane, (f.bits - 4) * sizeof *plane);
}

/* One item per tile. Lanes after the last row repeat the last row. */
KERNEL(quantize_weights, tile) {
    int64_t source = a->source, rows = a->outputs - tile * LANES, columns = a->columns;
    int64_t stride = columns * (source == FLOAT32 ? 4 : 2);
    const format f = FORMATS[a->number];
    lanes most = all((float)((1 << f.bits) - 1)), zero = all((float)f.zero);
    if (tile < 0) return (a->outputs + LANES - 1) / LANES;
    const uint8_t *from = (const uint8_t *)a->weights + tile * LANES * stride;
    uint8_t *to = a->matrix + tile * tile_bytes(f, columns);
    for (int64_t k = 0; k < columns; k += STRETCH) {
        int64_t width = columns - k < STRETCH ? columns - k : STRETCH, count = width / f.group;
        lanes x[STRETCH], scale[SCALES], minimum[SCALES] = {0};
        if (!gather_any(x, from + k * (stride / columns), width, stride, rows, source)) {
            a->faults[tile] = 1;
            return 0;
        }
        fit_all(f, x, count, scale, minimum);
        put_scales(f, to, k / GROUP, count, scale, minimum);
        for (int64_t g = 0; g < width / GROUP; g++) {
            bits quads[QUADS];
            for (int half = 0; half < 2; half++) {
                int64_t i = (2 * g + half) * count * 16 / width;
                encode(quads + half * QUADS / 2, x + g * GROUP + half * 16, inverse(scale[i]), minimum[i], zero, most);
            }
            put_codes(f, (uint8_t *)codes_of(f, to, k / GROUP + g), quads);
        }
    }
    return 0;
}
