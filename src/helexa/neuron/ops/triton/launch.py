"""Kernel launches."""

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **constants: Any) -> None:
    """Launch a kernel with one program per grid point, without waiting for the kernel.

    Args:
        kernel: a function under `triton.jit`.
        warps: warps of 32 threads per program.
        stages: loop iterations whose loads are in flight at a time.
        constants: compile-time constants of the kernel.
    """
    if all(grid):
        kernel[grid](*arguments, num_warps=warps, num_stages=stages, **constants)
