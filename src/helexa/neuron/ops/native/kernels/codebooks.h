/* Weights that are stored as indexes of codebook entries: the IQ1, IQ2 and IQ3 types of GGUF files.
 *
 * An entry has the codes of 8 or 4 (`width`) adjacent columns. A matrix begins with the table (64 bytes); four tables
 * of 64 values (see codebook_products.c); the values of all entries, `width` bytes each; and the codes of all entries,
 * packed to two numbers of 8 bits. The first numbers of all entries come first. A number has 4 codes of 2 bits, or 2
 * codes of 3 bits.
 *
 * A group of 32 columns is, for n = 4 or 8 indexes per row:
 *   low 8 bits of the indexes. 4 indexes of a row are adjacent. For n = 8, the first 4 indexes of all rows come first
 *   planes with one bit per index, for each upper bit of the indexes; for n = 8, separate planes for each 4 indexes
 *   sign bits, 4 bytes per row
 * A plane of 64 bits has bit 4 * row + i for index i. Byte p of the sign bits of a row has the signs of the columns
 * 4 * p to 4 * p + 3 and 16 + 4 * p to 16 + 4 * p + 3 (see `sign_bit`).
 *
 * The codebook of IQ1 is so large that lookups would take twice as long as the products of one row. A matrix of IQ1
 * therefore has no entries, and contains codes of 2 bits. A group is:
 *   numbers of 4 codes: byte 4 * row + p of the first 64 bytes has the columns 4 * p to 4 * p + 3, and the next 64
 *     bytes have the other 16 columns
 *   a plane that tells which entries are shifted
 *
 * Kernels expand a group to codes of 8 bits: the values of the table. A value is 128 more than its weight, so the lower
 * byte of 256 - value stands for the weight with the opposite sign. */
#ifndef CODEBOOKS_H
#define CODEBOOKS_H

#include "amx.h"
#include "graph.h"
#include "tiles.h"

#define EXPANDED_GROUP 512 /* bytes of the expanded codes of a group, in the layout of 8-bit codes */
#define EXPANDED_STRETCH (STRETCH_GROUPS * EXPANDED_GROUP)
#define SHIFTED 8 /* the table has the values of shifted entries from this index on */
#define ONES 0x0101010101010101u
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#define EXPANDS_IN_REGISTERS
#endif

/* Return the bit, in a byte of signs, of the columns 4 * p + k of a group. The bit of the columns 16 + 4 * p + k is two
 * bits higher. */
INLINE int sign_bit(const format f, const int k) {
    static const uint8_t bits[2][4] = {{4, 5, 0, 1}, {4, 0, 5, 1}};
    return bits[f.width == 4][k];
}

/* Return the bits of four adjacent columns of the first half of a group, each in its byte. */
INLINE uint32_t sign_bits(const format f) { return f.width == 8 ? 0x02012010 : 0x02200110; }

/* Write the values and codes of the codebook of a matrix. */
void pack_codebook(const format f, const uint8_t *table, const uint8_t *codebook, uint8_t *to);

/* Pack the codes of one group of one row as indexes. `places` is as in `pack_arguments`. */
void pack_indexes(const format f, const uint8_t *codes, const int32_t *places, uint8_t *to, int64_t lane);

/* Expand the 8 groups of a stretch, and prefetch the weights `ahead` bytes after the stretch. */
void expand(int64_t number, const uint8_t *matrix, const uint8_t *stretch, uint8_t *to, int64_t ahead);

/* Maximum rows of an item of `multiply_indexes`, without the rows that the last item has in addition. */
#define MAX_INDEX_ROWS (AMX ? 80 : 90)
/* Minimum number of tiles of an item, because `multiply_indexes` prepares activations once per item. An item has fewer
 * tiles if a thread would otherwise get no item. */
#define LEAST_TILES 8

/* Change the number of tiles and rows per item to numbers that suit `multiply_indexes`. */
INLINE void limit_items(int64_t *share, int64_t *rows, int64_t tiles) {
    int64_t of_thread = (tiles + threads() - 1) / threads(), least = of_thread < LEAST_TILES ? of_thread : LEAST_TILES;
    if (*share < least) *share = least;
    if (*rows > MAX_INDEX_ROWS) *rows = MAX_INDEX_ROWS;
}

/* Multiply the rows from `begin` to `end` by the tiles from `first` to `last` of a format with a codebook. */
void multiply_indexes(const multiply_arguments *a, int64_t begin, int64_t end, int64_t first, int64_t last);


#endif
