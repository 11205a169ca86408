"""Python interface of the compiled C kernels.

An instruction is a call of one kernel with its arguments, encoded as bytes. The C library runs lists of instructions,
which are called graphs.
"""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from helexa.neuron.ops.constants import ARGUMENT_BYTES, BFLOAT16, FLOAT16, FLOAT32, FORMAT_COUNT, LANES
from helexa.neuron.ops.kernel_header import CONSTANTS, STRUCTS
from helexa.neuron.ops.ranks.rank_group import RankGroup
from helexa.neuron.processes import heartbeat, stack_traces

Argument = Tensor | float | None
"""Kernel argument: a tensor, which is passed by its address, a number, or None for a null pointer."""

Form = tuple[int, int, bool, int, int, bool, torch.dtype]
"""Format of a quantized matrix.

The entries are: bits per code, levels of scales (1, or 2 for scales that are codes times a unit), whether groups have
minimums, the code of zero, the group size, whether a table maps codes to values, and the dtype of the scale units.
"""

TYPES = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
"""Codes in the C code for the dtypes of plain weights and scale units."""

_NUMBERS: dict[str, type] = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
_POINTEES = {
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8_t": torch.uint8,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
    "tile": torch.int64,
    "split": torch.int64,
    "span": torch.int64,
    "void": None,  # a pointer to any type
}


class KernelLibrary:
    """The functions of the compiled kernels in `kernels/*.c`.

    Attributes:
        layout: digest of the C files that define the layout of packed weights.
        origin: how the library was built, for the user.
        formats: the supported formats of quantized matrices, each with its number in the C code.
    """

    def __init__(self, library: ctypes.CDLL, layout: str, origin: str) -> None:
        self.layout, self.origin = layout, origin
        names = [name.removesuffix("_arguments") for name in STRUCTS if name.endswith("_arguments")]
        self._kernels = {name: _Kernel(name, ctypes.cast(getattr(library, name), ctypes.c_void_p)) for name in names}
        self._run = library.run_graph
        self._run.argtypes = (ctypes.c_char_p, ctypes.c_int64)
        self._run.restype = ctypes.c_int64
        self._packed_bytes = library.packed_bytes
        self._packed_bytes.argtypes = (ctypes.c_int64,) * 3
        self._packed_bytes.restype = ctypes.c_int64
        self._start_threads = library.start_threads
        self._start_threads.argtypes = (ctypes.c_int64,)
        library.known_formats.restype = ctypes.POINTER(structure("format") * FORMAT_COUNT)
        units = list(TYPES)
        self.formats: dict[Form, int] = {
            (f.bits, f.levels, bool(f.minimum), 0 if f.table else f.zero, f.group, bool(f.table), units[f.unit]): number
            for number, f in enumerate(library.known_formats().contents)
        }
        library.report_progress.argtypes = (ctypes.c_void_p,)
        library.report_progress.restype = None
        library.report_progress(heartbeat.kernel_count_address())
        self._report_progress = library.report_progress
        self._start_exchanges = library.start_exchanges
        self._start_exchanges.restype = None
        self._rank_progress = library.rank_progress
        self._rank_progress.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._rank_progress.restype = ctypes.c_void_p
        library.dump_stacks_on.argtypes = (ctypes.c_int64,)
        library.dump_stacks_on.restype = None
        stack_traces.use_native(library.dump_stacks_on)
        self.start_threads(1)

    def start_threads(self, count: int) -> None:
        """Increase the number of threads that run kernels to `count`. The number of threads never decreases."""
        self._start_threads(count)

    def join_ranks(self, memory: Tensor, ranks: RankGroup) -> None:
        """Prepare this rank for exchanging results with the other ranks (processes) in shared memory.

        All ranks except rank 0 also count their progress in the shared memory. While rank 0 waits for another rank, it
        reads the count of that rank.

        Args:
            memory: memory that the ranks share, uint8 in the layout of `kernels/ranks.c`.
            ranks: position of this process among the ranks.
        """
        self._start_exchanges()
        if ranks.rank > 0:
            self._report_progress(self._rank_progress(memory.data_ptr(), ranks.rank))

    def packed_bytes(self, number: int | None, outputs: int, columns: int) -> int:
        """Return the number of bytes of a packed matrix [outputs, columns].

        The result is less than 1 if a matrix of this shape cannot be packed.

        Args:
            number: number of the quantization format; None for bfloat16.
        """
        if number is None:
            return -(-outputs // LANES) * LANES * columns * 2
        return self._packed_bytes(number, outputs, columns)

    def instruction(self, kernel: str, arguments: Mapping[str, Argument], waits: bool = True) -> bytes:
        """Return an instruction that calls a kernel. `run` takes a graph, which is concatenated instructions.

        Args:
            kernel: name of the kernel.
            arguments: arguments by their names in the struct `<kernel>_arguments` of kernels.h.
            waits: whether the next instruction starts only after this instruction has ended.

        Raises:
            TypeError: an argument is missing, unknown or of a wrong type.
        """
        return self._kernels[kernel].instruction(arguments, waits)

    def run(self, graph: bytes) -> None:
        """Run the concatenated instructions `graph`, and return after the last instruction has ended.

        The memory of all arguments must still be allocated.

        Raises:
            ValueError: the graph has too many instructions.
        """
        count = len(graph) // INSTRUCTION_BYTES
        if self._run(graph, count):
            raise ValueError(f"a graph of {count} instructions exceeds the limit of {CONSTANTS['MAX_INSTRUCTIONS']}")

    def call(self, kernel: str, **arguments: Argument) -> None:
        """Run one kernel with `arguments`, and return after the kernel has ended (see `instruction`)."""
        self.run(self.instruction(kernel, arguments))


def structure(name: str) -> type[ctypes.Structure]:
    """Return a ctypes class for the struct `name` of kernels.h."""
    fields = [(field.name, ctypes.c_void_p if field.pointer else _NUMBERS[field.type]) for field in STRUCTS[name]]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


class Instruction(ctypes.Structure):
    """The C struct `instruction` of graph.h: address and arguments of a kernel.

    The field `waits` tells whether the next instruction starts only after this instruction has ended.
    """

    _fields_ = (("run", ctypes.c_void_p), ("waits", ctypes.c_int64), ("arguments", ctypes.c_uint8 * ARGUMENT_BYTES))


INSTRUCTION_BYTES = ctypes.sizeof(Instruction)


class _Kernel:
    """One kernel of the C library. Encodes calls with Python arguments as instructions."""

    def __init__(self, name: str, address: ctypes.c_void_p) -> None:
        self._name, self._address = name, address
        self._arguments = structure(f"{name}_arguments")
        padding = ctypes.c_uint8 * (ARGUMENT_BYTES - ctypes.sizeof(self._arguments))
        fields = [
            ("run", ctypes.c_void_p),
            ("waits", ctypes.c_int64),
            ("arguments", self._arguments),
            ("padding", padding),
        ]
        self._instruction = type(name, (ctypes.Structure,), {"_fields_": fields})
        self._fields = {
            field.name: (field.pointer, field.nullable, _POINTEES[field.type] if field.pointer else None)
            for field in STRUCTS[f"{name}_arguments"]
        }

    def instruction(self, arguments: Mapping[str, Argument], waits: bool) -> bytes:
        """Return an instruction that calls this kernel with `arguments` (see `KernelLibrary.instruction`)."""
        if arguments.keys() != self._fields.keys():
            odd = ", ".join(sorted(arguments.keys() ^ self._fields.keys()))
            raise TypeError(f"{self._name}: arguments that are missing or unknown: {odd}")
        values: list[float | None] = []
        for name, (pointer, nullable, dtype) in self._fields.items():
            value = arguments[name]
            if isinstance(value, Tensor):
                if not pointer or (dtype is not None and value.dtype != dtype):
                    raise TypeError(f"{self._name}: {name} is a tensor of {value.dtype}")
                values.append(value.data_ptr())
            elif pointer and not (value is None and nullable):
                raise TypeError(f"{self._name}: {name} is {value}, not a tensor of {dtype}")
            else:
                values.append(value)
        try:
            return bytes(self._instruction(self._address, waits, self._arguments(*values)))
        except TypeError as error:
            raise TypeError(f"{self._name}: {error} among {arguments}") from None
