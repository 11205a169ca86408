"""Kernels compiled for aarch64, which an emulator runs."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from helexa.neuron.ops.kernel_header import ARGUMENT_BYTES
from helexa.neuron.ops.native import compilation
from helexa.neuron.ops.native.compilation import KERNELS, compile_library
from helexa.neuron.ops.native.kernel_library import INSTRUCTION_BYTES, Argument, KernelLibrary, structure

CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
PROCESSORS = {"armv8_a": "cortex-a72", "armv8_2_a_dotprod": "neoverse-n1", "armv8_2_a_i8mm_bf16": "max"}
"""An emulated processor of each level. In the emulator, only `max` has the instructions of the last level."""
_SECONDS = 120
_ARENA_BYTES = 1 << 25  # larger storages contain many packed matrices


def compile_emulated(folder: Path, name: str, flags: tuple[str, ...] = ()) -> None:
    """Compile the kernels of the level `name` and their runner into `folder`, with additional compiler `flags`."""
    for program in ("cc", CROSS_COMPILER, EMULATOR):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on this machine: kernels for aarch64 cannot run")
    # Kernels for this machine know the sizes of packed matrices. No other function of `sizes` is called.
    compile_library(["cc"], ("-O0",), folder / "sizes.so")
    (level,) = (level for level in compilation.LEVELS if level.name == name)
    compile_library([CROSS_COMPILER, "-Werror"], (*level.flags, *flags), folder / "kernels.so")
    source = Path(__file__).with_name("run_emulated.c")
    command = [CROSS_COMPILER, "-std=gnu11", f"-I{KERNELS}", str(source), "-o", str(folder / "run_emulated"), "-ldl"]
    subprocess.run(command, check=True, timeout=_SECONDS)


class EmulatedLibrary(KernelLibrary):
    """Kernels for aarch64, with the interface of the kernels for this machine.

    Each graph runs in a new process of the emulator, on a copy of the memory of all its tensors. The library keeps the
    tensors of all calls. Kernels whose tensors contain addresses (`multiply_experts`) are not supported.
    """

    def __init__(self, folder: Path, processor: str) -> None:
        """Use the files that `compile_emulated` wrote to `folder`, and emulate the processor `processor`."""
        super().__init__(ctypes.CDLL(str(folder / "sizes.so")), "", "compiled for aarch64")
        self._file = folder / "calls"
        runner, library = str(folder / "run_emulated"), str(folder / "kernels.so")
        self._command = [EMULATOR, "-cpu", processor, "-L", SYSROOT, runner, library, str(self._file)]
        self._calls: list[tuple[str, dict[str, Argument], bool]] = []

    def instruction(self, kernel: str, arguments: Mapping[str, Argument], waits: bool = True) -> bytes:
        """Return the index of the call, in the size of an instruction."""
        super().instruction(kernel, arguments, waits)  # checks the arguments
        self._calls.append((kernel, dict(arguments), waits))
        return struct.pack("<q", len(self._calls) - 1).ljust(INSTRUCTION_BYTES, b"\0")

    def run(self, graph: bytes) -> None:
        """Run the calls in the emulator, and copy the results to their tensors."""
        indexes = [struct.unpack_from("<q", graph, start)[0] for start in range(0, len(graph), INSTRUCTION_BYTES)]
        areas, sizes, calls = dict[int, int](), dict[int, int](), list[bytes]()
        for name, arguments, waits in (self._calls[index] for index in indexes):
            layout, pointers = structure(f"{name}_arguments"), list[bytes]()
            numbers = {key: value for key, value in arguments.items() if not isinstance(value, Tensor)}
            for key, value in arguments.items():
                if isinstance(value, Tensor):
                    address, size = _area(value)
                    area = areas.setdefault(address, len(areas))
                    sizes[address] = max(size, sizes.get(address, 0))
                    offset = value.data_ptr() - address
                    pointers.append(struct.pack("<3q", getattr(layout, key).offset, area, offset))
            call = bytes(layout(**numbers)).ljust(ARGUMENT_BYTES, b"\0")
            calls.append(struct.pack("<32sq", name.encode(), waits) + call + struct.pack("<q", len(pointers)))
            calls.extend(pointers)
        memory = list(sizes.items())
        with self._file.open("wb") as file:
            file.write(struct.pack("<q", len(memory)))
            for address, size in memory:
                file.write(struct.pack("<q", size) + ctypes.string_at(address, size))
            file.write(struct.pack("<q", len(indexes)) + b"".join(calls))
        subprocess.run(self._command, check=True, timeout=_SECONDS)
        results, start = self._file.read_bytes(), 0
        for address, size in memory:
            ctypes.memmove(address, results[start : start + size], size)
            start += size
        assert start == len(results)


def _area(tensor: Tensor) -> tuple[int, int]:
    """Return address and size of the memory to copy: the tensor's storage, or only the tensor if it is in an arena."""
    storage = tensor.untyped_storage()
    if storage.nbytes() <= _ARENA_BYTES:
        return storage.data_ptr(), storage.nbytes()
    return tensor.data_ptr(), tensor.nbytes
