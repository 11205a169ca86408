/* Packing of quantized matrices into tiles, and dequantization of rows of packed matrices. */
#include "codebooks.h"
#include "graph.h"

/* Return the array of all FORMAT_COUNT formats. */
const format *known_formats(void) { return FORMATS; }

/* Return the number of bytes of a packed matrix of the format `number`, or 0 if it cannot be packed. */
int64_t packed_bytes(int64_t number, int64_t outputs, int64_t columns) {
    int64_t most = 1 << 30;
    if (number < 0 || number >= FORMAT_COUNT) return 0;
    if (outputs < 1 || columns < 1 || outputs > most || columns > most) return 0;
    const format f = FORMATS[number];
    if (columns % (f.levels == 2 ? STRETCH_GROUPS * GROUP : GROUP)) return 0;
    return head_bytes(f) + (outputs + LANES - 1) / LANES * tile_bytes(f, columns);
}

/* Pack the codes of one group of one row. */
static void pack_codes(const format f, const uint8_t *codes, uint32_t *to) {
    uint32_t quads[QUADS];
    memcpy(quads, codes, sizeof quads);
    if (f.bits == 8) {
        for (int j = 0; j < QUADS; j++) to[j * LANES] = quads[j];
        return;
    }
    if (f.bits < 4) {
        for (int j = 0; j < QUADS; j++) {
            to[j / 4 * LANES] |= (quads[j] & 0x03030303) << 2 * (j % 4);
            if (f.bits == 3) to[2 * LANES] |= ((quads[j] >> 2) & 0x01010101) << j;
        }
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

KERNEL(pack, tile) {
    const uint8_t *unit = a->unit, *scale = a->scale, *minimum_unit = a->minimum_unit, *minimum = a->minimum;
    int64_t outputs = a->outputs, columns = a->columns, groups = columns / GROUP;
    const format f = FORMATS[a->number];
    if (tile < 0) return (outputs + LANES - 1) / LANES;

    uint8_t *to = a->matrix + head_bytes(f) + tile * tile_bytes(f, columns);
    if (f.table && tile == 0) memcpy(a->matrix, a->table, 16);
    if (f.entries && tile == 0) pack_codebook(f, a->table, a->codebook, a->matrix + 64);
    memset(to, 0, tile_bytes(f, columns));
    int64_t unit_bytes = f.unit == FLOAT32 ? 4 : 2, units = f.levels == 1 ? groups : groups / STRETCH_GROUPS;
    for (int64_t lane = 0; lane < LANES && tile * LANES + lane < outputs; lane++) {
        int64_t row = tile * LANES + lane;
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *at = (uint8_t *)codes_of(f, to, g);
            const uint8_t *codes = a->codes + row * columns + g * GROUP;
            if (f.entries)
                pack_indexes(f, codes, a->places, at, lane);
            else
                pack_codes(f, codes, (uint32_t *)at + lane);
            if (f.levels == 1) {
                memcpy(at + code_bytes(f) + 2 * lane, unit + (row * units + g) * 2, 2);
                if (f.minimum) memcpy(at + code_bytes(f) + 32 + 2 * lane, minimum_unit + (row * units + g) * 2, 2);
                continue;
            }
            uint8_t *stretch = to + g / STRETCH_GROUPS * stretch_bytes(f);
            int64_t halves = halves_of(f), of_unit = row * units + g / STRETCH_GROUPS;
            memcpy(stretch + unit_bytes * lane, unit + of_unit * unit_bytes, unit_bytes);
            if (f.minimum) memcpy(stretch + 32 + 2 * lane, minimum_unit + of_unit * 2, 2);
            for (int64_t half = 0; half < halves; half++) {
                int64_t from = (row * groups + g) * halves + half, i = g % STRETCH_GROUPS * halves + half;
                stretch[64 + i * 16 + lane] = scale[from];
                if (f.minimum) stretch[64 + (STRETCH_GROUPS * halves + i) * 16 + lane] = minimum[from];
            }
        }
    }
    return 0;
}

KERNEL(embed, item) {
    int64_t columns = a->columns;
    const format f = FORMATS[a->number];
    if (item < 0) return a->count;
    int64_t token = a->tokens[item] - a->first;
    float *out = a->out + item * columns;
    if (token < 0 || token >= a->outputs) {
        memset(out, 0, columns * sizeof *out);
        return 0;
    }
    const uint8_t *tile = a->matrix + head_bytes(f) + token / LANES * tile_bytes(f, columns);
    int lane = (int)(token % LANES), slice_lane = lane % SLICE; /* lane of the row, and its lane within the slice */
    uint8_t expanded[EXPANDED_STRETCH];
    format stored = f; /* the format of the codes at `codes` */
    if (f.entries) stored.bits = 8;
    for (int64_t g = 0; g < columns / GROUP; g++) {
        slice scale[2], minimum[2];
        unpack_scales(f, tile, g, lane - slice_lane, scale, minimum);
        const uint8_t *codes = lane_codes(f, tile, g, lane - slice_lane);
        if (f.entries) {
            codes = expanded + g % STRETCH_GROUPS * EXPANDED_GROUP + 4 * (lane - slice_lane);
            const uint8_t *stretch = tile + g / STRETCH_GROUPS * stretch_bytes(f);
            if (g % STRETCH_GROUPS == 0) expand(a->number, a->matrix, stretch, expanded, 0);
        }
        for (int i = 0; i < GROUP; i++, out++) {
            int code = (int)(quad_codes(stored, codes, i / 4)[slice_lane] >> (i % 4 * 8) & 255), half = i / f.group;
            *out = scale[half][slice_lane] * (float)((f.table && !f.entries ? a->matrix[code] : code) - f.zero);
            if (f.minimum) *out += minimum[half][slice_lane];
            *out *= a->factor;
        }
    }
    return 0;
}
