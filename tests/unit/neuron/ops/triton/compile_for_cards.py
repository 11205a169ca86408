"""Compiles the engine's Triton kernels for several GPU models, without needing a GPU.

The test process runs kernels in Triton's interpreter, so this module runs in a subprocess (see `test_compiled.py`).
It calls each launch of `launches.LAUNCHES` with tensors on torch's `meta` device, which have shapes but no data.
Tile sizes, warps and specializations are those that the GPU would get.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from helexa.neuron.ops.triton.gpu_ops import GpuOps
from helexa.neuron.ops.triton.launch_and_graphs import GpuProperties

KIB = 1 << 10
CARDS = {
    "sm_75": GpuProperties((7, 5), 64 * KIB, 40),  # T4
    "sm_86": GpuProperties((8, 6), 99 * KIB, 82),  # RTX 3090
    "sm_90": GpuProperties((9, 0), 227 * KIB, 132),  # H200
    "sm_120": GpuProperties((12, 0), 99 * KIB, 170),  # RTX 5090
}
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores")
_STACK = re.compile(r"(\d+) bytes stack frame")


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel of a launch.

    Attributes:
        kernel: Name of the kernel's function.
        registers: Registers per thread.
        spilled, stack: Bytes of spills and of stack per thread.
        shared: Bytes of shared memory per program.
        ptx: The assembly text.
    """

    kernel: str
    warps: int
    registers: int
    spilled: int
    stack: int
    shared: int
    ptx: str

    def loads(self, bits: int) -> int:
        """Count load instructions of `bits` bits per thread from global memory, into registers or shared memory."""
        loads = re.findall(r"ld\.global\S*?\.v(\d)\.b(\d+)", self.ptx)
        wide = sum(int(count) * int(width) == bits for count, width in loads)
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x([0-9a-f]+)", self.ptx)
        return wide + sum(int(size, 16) * 8 == bits for size in copies)


def compile_all(cache: Path) -> dict[str, dict[str, list[Compiled]]]:
    """Compile every launch for each of its cards; return the kernels by launch name and card name."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "neuron.ops.triton.compile_for_cards"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    compiled = json.loads(result.stdout)
    return {
        name: {gpu: [Compiled(**kernel) for kernel in kernels] for gpu, kernels in cards.items()}
        for name, cards in compiled.items()
    }


class _Absent:
    """A driver for Triton that describes a card which is not installed."""

    def __init__(self, gpu: GpuProperties) -> None:
        from triton.backends.compiler import GPUTarget

        self._arch = 10 * gpu.capability[0] + gpu.capability[1]
        self._target = GPUTarget("cuda", self._arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._arch  # makes Triton compile separately for each card

    def get_current_stream(self, device: int) -> int:
        return 0


class _Recorder:
    """Compiles kernels instead of launching them, and lists the compiled kernels."""

    def __init__(self) -> None:
        from triton.runtime.jit import JITFunction

        self._run = JITFunction.run
        self._compiled: dict[int, Compiled] = {}
        self.launched: list[Compiled] = []
        JITFunction.run = lambda function, *args, grid, warmup, **options: self._compile(function, args, grid, options)

    def _compile(self, function: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> None:
        assert max(grid[1:], default=0) < 1 << 16, "only the first dimension may be as large"
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = self._run(function, *args, grid=grid, warmup=True, **options)
        if id(kernel) not in self._compiled:  # Triton keeps all kernels alive, so ids are unique
            used, spilled, stack = (
                sum(map(int, pattern.findall(log.getvalue()))) for pattern in (_USED, _SPILLED, _STACK)
            )
            assert used, "ptxas printed no register count"
            numbers = (kernel.name, kernel.metadata.num_warps, used, spilled, stack, kernel.metadata.shared)
            self._compiled[id(kernel)] = Compiled(*numbers, kernel.asm["ptx"])
        self.launched.append(self._compiled[id(kernel)])


def _main() -> None:
    import triton
    from triton import knobs

    from neuron.ops.triton.launches import LAUNCHES

    knobs.nvidia.dump_ptxas_log = True
    recorder = _Recorder()
    compiled: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in LAUNCHES}
    for card_name, gpu in CARDS.items():
        triton.runtime.driver.set_active(_Absent(gpu))
        dtype = torch.bfloat16 if gpu.capability >= (8, 0) else torch.float16
        for name, launch in LAUNCHES.items():
            if card_name not in launch.cards:
                continue
            recorder.launched.clear()
            launch(GpuOps(torch.device("meta"), dtype, launch.kv_bits, gpu))
            compiled[name][card_name] = [asdict(kernel) for kernel in recorder.launched]
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    _main()
