"""Compiles for GPUs that are not there what the engine would launch on them.

The tests' own process interprets, so this runs in another one (see `test_compiled.py`). There each launch of
`launches.LAUNCHES` is called with tensors on torch's `meta` device, which have shapes and no numbers: tiles, warps and
specialisations are those that a GPU gets.
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

from helexa.neuron.ops.gpu.gpu import GpuOps
from helexa.neuron.ops.triton.card import Card

KIB = 1 << 10
CARDS = {
    "sm_75": Card((7, 5), 64 * KIB, 40),  # T4
    "sm_86": Card((8, 6), 99 * KIB, 82),  # RTX 3090
    "sm_90": Card((9, 0), 227 * KIB, 132),  # H200
    "sm_120": Card((12, 0), 99 * KIB, 170),  # RTX 5090
}
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores")
_STACK = re.compile(r"(\d+) bytes stack frame")


@dataclass(frozen=True)
class Compiled:
    """What came of one kernel of a launch.

    Attributes:
        kernel: its function's name.
        registers: of each thread.
        spilled, stack: bytes of each thread that lie in memory instead.
        shared: bytes of each program.
        ptx: the assembly text.
    """

    kernel: str
    warps: int
    registers: int
    spilled: int
    stack: int
    shared: int
    ptx: str

    def loads(self, bits: int) -> int:
        """How many instructions load so many bits of global memory for a thread, into registers or shared memory."""
        found = re.findall(r"ld\.global\S*?\.v(\d)\.b(\d+)", self.ptx)
        wide = sum(int(count) * int(width) == bits for count, width in found)
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x([0-9a-f]+)", self.ptx)
        return wide + sum(int(size, 16) * 8 == bits for size in copies)


def compile_all(cache: Path) -> dict[str, dict[str, list[Compiled]]]:
    """Every launch for each of its cards, by their names."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "neuron.ops.triton.compiling"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    return {
        name: {card: [Compiled(**kernel) for kernel in kernels] for card, kernels in cards.items()}
        for name, cards in found.items()
    }


class _Absent:
    """What Triton asks its driver for, of a card that is not there."""

    def __init__(self, card: Card) -> None:
        from triton.backends.compiler import GPUTarget

        self._arch = 10 * card.capability[0] + card.capability[1]
        self._target = GPUTarget("cuda", self._arch, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._arch  # each has kernels of its own

    def get_current_stream(self, device: int) -> int:
        return 0


class _Recorder:
    """Compiles where Triton would launch."""

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
        if id(kernel) not in self._compiled:  # Triton keeps them all
            used, spilled, stack = (
                sum(map(int, pattern.findall(log.getvalue()))) for pattern in (_USED, _SPILLED, _STACK)
            )
            assert used, "ptxas said nothing"
            made = (kernel.name, kernel.metadata.num_warps, used, spilled, stack, kernel.metadata.shared)
            self._compiled[id(kernel)] = Compiled(*made, kernel.asm["ptx"])
        self.launched.append(self._compiled[id(kernel)])


def _main() -> None:
    import triton
    from triton import knobs

    from neuron.ops.triton.launches import LAUNCHES

    knobs.nvidia.dump_ptxas_log = True
    recorder = _Recorder()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in LAUNCHES}
    for card_name, card in CARDS.items():
        triton.runtime.driver.set_active(_Absent(card))
        dtype = torch.bfloat16 if card.capability >= (8, 0) else torch.float16
        for name, launch in LAUNCHES.items():
            if card_name not in launch.cards:
                continue
            recorder.launched.clear()
            launch(GpuOps(torch.device("meta"), dtype, launch.kv_bits, card))
            found[name][card_name] = [asdict(kernel) for kernel in recorder.launched]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _main()
