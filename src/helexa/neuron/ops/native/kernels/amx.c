/* Permission to use the registers of AMX, and their sizes. */
#include "amx.h"

#if AMX
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM */
#define TILE_DATA 18              /* number of the processor state component that holds the registers */

int amx_allowed;

/* Use AMX from now on if `wanted` is set and Linux permits AMX for all threads of this process. Return whether AMX is
 * used. The layout of rounded activations depends on AMX (see blocks.h). Therefore, do not call this function while a
 * graph runs, or between `quantize` and the products of its result. */
int64_t use_amx(int64_t wanted) {
    amx_allowed = wanted && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return amx_allowed;
}

void size_registers(int64_t rows, int64_t quads) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } sizes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        sizes.rows[i] = (uint8_t)(i == 4 || i == 5 ? quads : rows);
        sizes.row_bytes[i] = (uint16_t)(i < 6 ? 4 * LANES : 4 * quads);
    }
    __asm__ volatile("" : : "r"(&sizes) : "memory"); /* GCC assumes that only the first eight bytes are read */
    _tile_loadconfig(&sizes);
}
#else
int64_t use_amx(int64_t wanted) {
    (void)wanted;
    return 0;
}
#endif
