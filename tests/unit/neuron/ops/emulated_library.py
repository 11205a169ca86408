"""Kernels compiled for aarch64, which an emulator runs."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from helexa.neuron.ops.constants import ARGUMENT_BYTES
from helexa.neuron.ops.native.kernel_library import INSTRUCTION_BYTES, Argument, KernelLibrary, structure
from helexa.neuron.ops.native.machine_code import prebuilt
from helexa.neuron.ops.native.machine_code.compilation import KERNELS, compile_library

CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_SYSROOT = "/usr/aarch64-linux-gnu"
_SECONDS = 120


class EmulatedLibrary(KernelLibrary):
    """Kernels for aarch64, with the interface of the kernels for this machine.

    Each graph runs in a new process of the emulator, on a copy of the memory of all its tensors. Kernels whose tensors
    contain addresses (`multiply_experts`) are not supported.
    """

    def __init__(self, folder: Path) -> None:
        """Compile the kernels into `folder`."""
        for program in ("cc", CROSS_COMPILER, EMULATOR):
            if shutil.which(program) is None:
                pytest.skip(f"no {program} on this machine: kernels for aarch64 cannot run")
        # Kernels for this machine know the sizes of packed matrices. No other function of `sizes` is called.
        compile_library(["cc"], ("-O0",), folder / "sizes.so")
        super().__init__(ctypes.CDLL(str(folder / "sizes.so")), "", "compiled for aarch64")
        (level,) = (level for level in prebuilt.LEVELS if level.name == "armv8_a")
        library, runner = folder / "kernels.so", folder / "run_emulated"
        compile_library([CROSS_COMPILER, "-Werror"], level.flags, library)
        source = Path(__file__).with_name("run_emulated.c")
        command = [CROSS_COMPILER, "-std=gnu11", f"-I{KERNELS}", str(source), "-o", str(runner), "-ldl"]
        subprocess.run(command, check=True, timeout=_SECONDS)
        self._file = folder / "calls"
        self._command = [EMULATOR, "-L", _SYSROOT, str(runner), str(library), str(self._file)]
        self._calls: list[tuple[str, dict[str, Argument], bool]] = []

    def instruction(self, kernel: str, arguments: Mapping[str, Argument], waits: bool = True) -> bytes:
        """Return the index of the call, in the size of an instruction."""
        super().instruction(kernel, arguments, waits)  # checks the arguments
        self._calls.append((kernel, dict(arguments), waits))
        return struct.pack("<q", len(self._calls) - 1).ljust(INSTRUCTION_BYTES, b"\0")

    def run(self, graph: bytes) -> None:
        """Run the calls in the emulator, and copy the results to their tensors."""
        indexes = [struct.unpack_from("<q", graph, start)[0] for start in range(0, len(graph), INSTRUCTION_BYTES)]
        areas, sizes, calls = dict[int, int](), list[int](), list[bytes]()
        for name, arguments, waits in (self._calls[index] for index in indexes):
            layout, pointers = structure(f"{name}_arguments"), list[bytes]()
            numbers = {key: value for key, value in arguments.items() if not isinstance(value, Tensor)}
            for key, value in arguments.items():
                if isinstance(value, Tensor):
                    storage = value.untyped_storage()
                    if storage.data_ptr() not in areas:
                        areas[storage.data_ptr()] = len(areas)
                        sizes.append(storage.nbytes())
                    offset = value.data_ptr() - storage.data_ptr()
                    pointers.append(struct.pack("<3q", getattr(layout, key).offset, areas[storage.data_ptr()], offset))
            call = bytes(layout(**numbers)).ljust(ARGUMENT_BYTES, b"\0")
            calls.append(struct.pack("<32sq", name.encode(), waits) + call + struct.pack("<q", len(pointers)))
            calls.extend(pointers)
        memory = list(zip(areas, sizes, strict=True))
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
