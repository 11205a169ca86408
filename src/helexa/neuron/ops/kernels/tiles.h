/* How quantised weights lie: in tiles of 16 rows, one per lane.
 *
 * A tile is a list of groups of 32 columns, or, for formats with scales in two levels, of spans of 8 such groups:
 *   group: codes; scale float16[16]; minimum float16[16] if there is one
 *   span: unit float16[16], minimum's unit float16[16]; scale codes [8 * (16 or 2 * 16)]; minimum codes [8 * 16] if
 *         there are any; codes of 8 groups
 * Codes of a group: columns 4 j to 4 j + 3 of all rows are the quad j, 64 bytes. Up to 6 bits, the four low bits of the
 * quads j and j + 4 share 64 bytes, and the bits above follow in planes.
 */
#ifndef TILES_H
#define TILES_H

#include "lanes.h"

#define GROUP 32
#define QUADS 8
#define SPAN 8 /* groups */

typedef struct {
    int bits, levels, minimum, zero, group;
} format;

/* In the order of `_FORMATS` in packed.py. */
static const format FORMATS[] = {
    {4, 1, 0, 8, 32},   /* Q4_0 */
    {4, 1, 1, 0, 32},   /* Q4_1 */
    {5, 1, 0, 16, 32},  /* Q5_0 */
    {5, 1, 1, 0, 32},   /* Q5_1 */
    {8, 1, 0, 128, 32}, /* Q8_0 */
    {4, 2, 1, 0, 32},   /* Q4_K */
    {5, 2, 1, 0, 32},   /* Q5_K */
    {6, 2, 0, 32, 16},  /* Q6_K */
};
#define EACH_FORMAT(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)

INLINE int64_t code_bytes(const format f) { return f.bits == 8 ? 512 : 256 + (f.bits - 4) * 64; }

INLINE int64_t scale_bytes(const format f) {
    return f.levels == 1 ? 32 + 32 * f.minimum : GROUP / f.group * 16 + 16 * f.minimum;
}

INLINE int64_t span_bytes(const format f) { return 64 + SPAN * (code_bytes(f) + scale_bytes(f)); }

/* Bytes of a tile of `columns` columns. */
INLINE int64_t tile_bytes(const format f, int64_t columns) {
    int64_t groups = columns / GROUP;
    return f.levels == 1 ? groups * (code_bytes(f) + scale_bytes(f)) : groups / SPAN * span_bytes(f);
}

/* Where the codes of group `g` of a tile begin. */
INLINE const uint8_t *codes_of(const format f, const uint8_t *tile, int64_t g) {
    if (f.levels == 1) return tile + g * (code_bytes(f) + scale_bytes(f));
    return tile + g / SPAN * span_bytes(f) + 64 + SPAN * scale_bytes(f) + g % SPAN * code_bytes(f);
}

#endif
