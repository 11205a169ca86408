"""How kernels are run."""

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **constants: Any) -> None:
    """Run a kernel's programs, one for each place of a grid, without waiting for them.

    Args:
        kernel: a function under `triton.jit`.
        warps: of 32 threads, to a program.
        stages: of a loop's loads that are under way at a time.
        constants: what the kernel is compiled for.
    """
    if all(grid):
        kernel[grid](*arguments, num_warps=warps, num_stages=stages, **constants)
