"""Launch of Triton kernels."""

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **constants: Any) -> None:
    """Launch a Triton kernel with one program (thread block) per grid point, without waiting for the kernel.

    If a grid dimension is 0, nothing is launched.

    Args:
        kernel: a function decorated with `triton.jit`.
        warps: number of warps of 32 threads per program.
        stages: number of loop iterations whose memory loads are in flight at the same time.
        constants: compile-time constants of the kernel.
    """
    if all(grid):
        kernel[grid](*arguments, num_warps=warps, num_stages=stages, **constants)
