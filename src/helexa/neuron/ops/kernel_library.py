"""The compiled kernels as Python sees them: addresses to put on a tape, and the call that runs one."""

import ctypes
from collections.abc import Sequence

import numpy as np

from helexa.neuron import heartbeat

KERNELS = (
    "add_gated",
    "add_rms_norm",
    "argmax",
    "attend",
    "choose_rows",
    "clamp_gate_up",
    "combine",
    "embed",
    "embed_plain",
    "gate_mul",
    "multiply",
    "multiply_experts",
    "multiply_plain",
    "narrow",
    "pack",
    "pack_plain",
    "quantise",
    "quantise_experts",
    "quantize_weights",
    "rope_tables",
    "rotate_store",
    "route",
    "sum_pairs",
)
_MAX_ARGUMENTS = 16
_LANES = 16

Instruction = tuple[str, bool, Sequence[int]]
"""A kernel's name, whether the next instruction waits for it, and its arguments: addresses and numbers."""


class KernelLibrary:
    """What `kernels/*.c` export.

    Attributes:
        layout: changes whenever tiles may lie otherwise.
    """

    def __init__(self, library: ctypes.CDLL, layout: str) -> None:
        self.layout = layout
        self._addresses = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in KERNELS}
        self._run = library.run_tape
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._run.restype = ctypes.c_int64
        self._packed_bytes = library.packed_bytes
        self._packed_bytes.argtypes = (ctypes.c_int64,) * 3
        self._packed_bytes.restype = ctypes.c_int64
        self._start_threads = library.start_threads
        self._start_threads.argtypes = (ctypes.c_int64,)
        library.report_progress.argtypes = (ctypes.c_void_p,)
        library.report_progress.restype = None
        library.report_progress(heartbeat.kernel_count_address())
        self.start_threads(1)

    def start_threads(self, count: int) -> None:
        """Let kernels run on `count` threads from now on; a process's threads are never taken back."""
        self._start_threads(count)

    def packed_bytes(self, number: int | None, outputs: int, columns: int) -> int:
        """Bytes that a matrix takes as tiles of format `number`, or of bfloat16; less than 1 for what cannot be."""
        if number is None:
            return -(-outputs // _LANES) * _LANES * columns * 2
        return self._packed_bytes(number, outputs, columns)

    def encode(self, instructions: Sequence[Instruction]) -> np.ndarray:
        """A tape: int64 [instructions, 2 + arguments]."""
        tape = np.zeros((len(instructions), 2 + _MAX_ARGUMENTS), dtype=np.int64)
        for line, (name, waits, arguments) in zip(tape, instructions, strict=True):
            line[0], line[1] = self._addresses[name], waits
            line[2 : 2 + len(arguments)] = arguments
        return tape

    def run(self, tape: np.ndarray) -> None:
        """Run a tape to its end; every address on it must still be good."""
        if self._run(tape.ctypes.data, len(tape)):
            raise ValueError(f"a tape of {len(tape)} instructions is too long")
