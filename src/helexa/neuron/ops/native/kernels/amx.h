/* The processor's unit for products of matrices (AMX). Its registers hold matrices of up to 16 rows of 64 bytes.
 *
 * Linux gives a process these registers only on request. If it refuses, or is too old to know them, the kernels use the
 * other instructions of the processor, with the same results. */
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

/* Give the registers 0 to 3 the size of sums [rows, LANES], the registers 4 and 5 that of codes of weights of `quads`
 * quads, and the registers 6 and 7 that of activations [rows, 4 * quads]. They belong to this thread until
 * `_tile_release`, after which the operating system no longer saves them. */
void size_registers(int64_t rows, int64_t quads);
#else
#define amx_allowed 0
#endif

#endif
