/* The processor's unit for products of matrices (AMX). Its registers hold matrices of up to 16 rows of 64 bytes.
 *
 * Linux gives a process these registers only on request. If Linux refuses the request, or is too old for AMX, the
 * kernels use other instructions of the processor, with the same results. */
#ifndef AMX_H
#define AMX_H

#include "slices.h"

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__)
#define AMX 1
#else
#define AMX 0
#endif

#if AMX
extern int amx_allowed; /* whether kernels use the registers */

/* Set the sizes of the registers. The registers 0 to 3 hold sums [rows, LANES], the registers 4 and 5 hold the codes of
 * `quads` quads of weights (see tiles.h), and the registers 6 and 7 hold activations [rows, 4 * quads]. After
 * `_tile_release`, the operating system no longer saves the registers of this thread. */
void size_registers(int64_t rows, int64_t quads);
#else
#define amx_allowed 0
#endif

#endif
