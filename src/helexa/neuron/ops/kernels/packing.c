/* Quantised matrices are laid out, and rows of them taken back. */
#include "tape.h"
#include "tiles.h"

/* Bytes of a packed matrix, or 0 for what is none. */
int64_t packed_bytes(int64_t number, int64_t outputs, int64_t columns) {
    int64_t formats = sizeof FORMATS / sizeof *FORMATS, most = 1 << 30;
    if (number < 0 || number >= formats || outputs < 1 || columns < 1 || outputs > most || columns > most) return 0;
    const format f = FORMATS[number];
    if (columns % (f.levels == 2 ? SPAN * GROUP : GROUP)) return 0;
    return head_bytes(f) + (outputs + LANES - 1) / LANES * tile_bytes(f, columns);
}

/* The codes of one group of one row. */
static void pack_codes(const format f, const uint8_t *codes, uint32_t *to) {
    uint32_t quads[QUADS];
    memcpy(quads, codes, sizeof quads);
    if (f.bits == 8) {
        for (int j = 0; j < QUADS; j++) to[j * LANES] = quads[j];
        return;
    }
    for (int j = 0; j < 4; j++) to[j * LANES] = (quads[j] & 0x0f0f0f0f) | (quads[j + 4] & 0x0f0f0f0f) << 4;
    if (f.bits == 5) {
        uint32_t plane = 0;
        for (int j = 0; j < QUADS; j++) plane |= ((quads[j] >> 4) & 0x01010101) << j;
        to[4 * LANES] = plane;
    }
    if (f.bits == 6)
        for (int half = 0; half < 2; half++) {
            uint32_t plane = 0;
            for (int i = 0; i < 4; i++) plane |= ((quads[4 * half + i] >> 4) & 0x03030303) << (2 * i);
            to[(4 + half) * LANES] = plane;
        }
}

/* codes uint8 [outputs, columns]; units [outputs, units] as the format has them; scale codes, 8 bits [outputs, columns
 * / group], or null; the same for minimums; table uint8 [16] or null -> a packed matrix. Rows beyond the last are
 * nought. */
int64_t pack(const int64_t *a, int64_t tile) {
    const uint8_t *codes = (const uint8_t *)a[0];
    const uint8_t *unit = (const uint8_t *)a[1], *scale = (const uint8_t *)a[2];
    const uint8_t *minimum_unit = (const uint8_t *)a[3], *minimum = (const uint8_t *)a[4];
    int64_t outputs = a[7], columns = a[8], groups = columns / GROUP;
    const format f = FORMATS[a[9]];
    if (tile < 0) return (outputs + LANES - 1) / LANES;

    uint8_t *matrix = (uint8_t *)a[6], *to = matrix + head_bytes(f) + tile * tile_bytes(f, columns);
    if (f.table && tile == 0) memcpy(matrix, (const uint8_t *)a[5], 16);
    memset(to, 0, tile_bytes(f, columns));
    int64_t unit_bytes = f.unit == FLOAT32 ? 4 : 2, units = f.levels == 1 ? groups : groups / SPAN;
    for (int64_t lane = 0; lane < LANES && tile * LANES + lane < outputs; lane++) {
        int64_t row = tile * LANES + lane;
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *at = (uint8_t *)codes_of(f, to, g);
            pack_codes(f, codes + row * columns + g * GROUP, (uint32_t *)at + lane);
            if (f.levels == 1) {
                memcpy(at + code_bytes(f) + 2 * lane, unit + (row * units + g) * 2, 2);
                if (f.minimum) memcpy(at + code_bytes(f) + 32 + 2 * lane, minimum_unit + (row * units + g) * 2, 2);
                continue;
            }
            uint8_t *span = to + g / SPAN * span_bytes(f);
            int64_t halves = halves_of(f), of_unit = row * units + g / SPAN;
            memcpy(span + unit_bytes * lane, unit + of_unit * unit_bytes, unit_bytes);
            if (f.minimum) memcpy(span + 32 + 2 * lane, minimum_unit + of_unit * 2, 2);
            for (int64_t half = 0; half < halves; half++) {
                int64_t from = (row * groups + g) * halves + half, i = g % SPAN * halves + half;
                span[64 + i * 16 + lane] = scale[from];
                if (f.minimum) span[64 + (SPAN * halves + i) * 16 + lane] = minimum[from];
            }
        }
    }
    return 0;
}

/* Rows `tokens` int32 [count] of a packed matrix -> float32 [count, columns]. */
int64_t embed(const int64_t *a, int64_t item) {
    const int32_t *tokens = (const int32_t *)a[0];
    const uint8_t *matrix = (const uint8_t *)a[1];
    int64_t count = a[3], columns = a[4];
    const format f = FORMATS[a[6]];
    if (item < 0) return count;
    const uint8_t *tile = matrix + head_bytes(f) + tokens[item] / LANES * tile_bytes(f, columns);
    float *out = (float *)a[2] + item * columns, factor;
    memcpy(&factor, a + 5, sizeof factor);
    int lane = (int)(tokens[item] % LANES), of = lane % SLICE; /* lanes, and those of its slice */
    for (int64_t g = 0; g < columns / GROUP; g++) {
        slice scale[2], minimum[2];
        unpack_scales(f, tile, g, lane - of, scale, minimum);
        const uint8_t *codes = lane_codes(f, tile, g, lane - of);
        for (int i = 0; i < GROUP; i++, out++) {
            int code = (int)(quad_codes(f, codes, i / 4)[of] >> (i % 4 * 8) & 255), half = i / f.group;
            *out = scale[half][of] * (float)((f.table ? matrix[code] : code) - f.zero);
            if (f.minimum) *out += minimum[half][of];
            *out *= factor;
        }
    }
    return 0;
}
