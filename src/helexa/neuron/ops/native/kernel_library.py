"""Python interface of the C kernels, and the choice of the compiled library.

An instruction is a call of one kernel with its arguments, encoded as bytes. The C library runs lists of instructions,
which are called graphs.
"""

import ctypes
import hashlib
import logging
import os
import platform
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from helexa.core.errors import ConfigError
from helexa.core.logs import quoted
from helexa.neuron import tensors
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.ops.kernel_header import (
    ARGUMENT_BYTES,
    BFLOAT16,
    CONSTANTS,
    FLOAT16,
    FLOAT32,
    FORMAT_COUNT,
    LANES,
    STRUCTS,
    Field,
)
from helexa.neuron.ops.native.compilation import (
    FLAGS,
    KERNELS,
    THIS_PROCESSOR,
    c_compiler,
    compile_for_this_processor,
    prebuilt_library,
    sources,
)
from helexa.neuron.ops.rank_group_and_shares import RankGroup
from helexa.neuron.processes import heartbeat, stack_traces_and_exit_reasons
from helexa.neuron.tensors import DType, Tensor

_log = logging.getLogger("helexa.neuron.ops")
# These files define the layout of packed weights.
_LAYOUT = ("kernels.h", "tiles.h", "packing.c", "codebooks.h", "codebooks.c", "plain.c", "quantize.c")
_COMPILER_SECONDS = 600.0  # time limit per C file; a small processor that also runs other programs needs minutes

# Kernel argument: a tensor, which is passed by its address, a number, or None for a null pointer.
Argument = Tensor | float | None


class Format(NamedTuple):
    """Format of a quantized matrix, as in the struct `format` of kernels.h."""

    bits: int  # bits per code
    levels: int  # 1 if a scale is one floating-point number, 2 if a scale is the product of a code and a unit
    minimum: bool  # whether groups have minimums
    zero: int  # the code that stands for the value 0; 0 if a table maps codes to values
    group: int  # group size
    table: bool  # whether a table maps codes to values
    entries: int  # number of entries of the codebook; 0 without a codebook
    width: int  # number of codes per entry of the codebook; 0 without a codebook
    unit: DType  # dtype of the scale units


_NUMBERS: dict[str, type] = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
_CODES = {"int": "i", "int64_t": "q", "float": "f"}  # codes of these types in the module `struct`
# Names of the dtypes of tensors to which a pointer in the C code may point. A pointer to `void` may point to a tensor
# of any dtype.
_POINTEES = {
    "float": "float32",
    "bfloat16": "bfloat16",
    "uint8_t": "uint8",
    "int32_t": "int32",
    "int64_t": "int64",
    "tile": "int64",
    "split": "int64",
    "span": "int64",
}


class KernelLibrary:
    """The functions of the compiled kernels in `kernels/*.c`."""

    def __init__(self, library: ctypes.CDLL, layout: str, origin: str) -> None:
        # `layout` is a digest of the C files that define the layout of packed weights. `origin` tells the user how the
        # library was built.
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
        units = list(type_codes())
        # the supported formats of quantized matrices, each with its number in the C code
        self.formats = {
            Format(
                f.bits,
                f.levels,
                bool(f.minimum),
                0 if f.table else f.zero,
                f.group,
                bool(f.table),
                f.entries,
                f.width,
                units[f.unit],
            ): number
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
        stack_traces_and_exit_reasons.use_native(library.dump_stacks_on)
        self._use_amx = library.use_amx
        self._use_amx.argtypes = (ctypes.c_int64,)
        self._use_amx.restype = ctypes.c_int64
        self.start_threads(1)
        self.use_amx(True)

    def start_threads(self, count: int) -> None:
        """Run kernels with at least `count` threads from now on."""
        self._start_threads(count)

    def use_amx(self, wanted: bool) -> bool:
        """Use AMX from now on if `wanted` and possible; return whether it is used.

        AMX is possible if the library was compiled for it, and the system lets this process use the AMX registers.
        """
        return bool(self._use_amx(wanted))

    def join_ranks(self, memory: Tensor, ranks: RankGroup) -> None:
        """Prepare this rank for the exchange with other ranks in shared memory.

        The memory is uint8 in the layout of `kernels/all_reduce.c`.
        """
        self._start_exchanges()
        # Ranks other than 0 count their progress in the shared memory. While rank 0 waits for another rank, it reads
        # this rank's count, to see whether the rank still makes progress.
        if ranks.rank > 0:
            self._report_progress(self._rank_progress(memory.data_ptr(), ranks.rank))

    def packed_bytes(self, number: int | None, outputs: int, columns: int) -> int:
        """Return the number of bytes of a packed matrix [outputs, columns].

        `number` is the number of the quantization format (see `formats`), or None for bfloat16. The result is less than
        1 if a matrix of this shape cannot be packed.
        """
        if number is None:
            return -(-outputs // LANES) * LANES * columns * 2
        return self._packed_bytes(number, outputs, columns)

    def instruction(self, kernel: str, arguments: Mapping[str, Argument], waits: bool = True) -> bytes:
        """Return an instruction that calls a kernel.

        Args:
            arguments: arguments by their names in the struct `<kernel>_arguments` of kernels.h.
            waits: whether the next instruction starts only after this instruction has ended.

        Raises:
            TypeError: an argument is missing, unknown or of a wrong type.
        """
        return self._kernels[kernel].instruction(arguments, waits)

    def run(self, graph: bytes) -> None:
        """Run the concatenated instructions `graph`, and wait for the last one.

        The memory of all arguments must still be allocated.

        Raises:
            ValueError: `graph` has too many instructions.
        """
        count = len(graph) // INSTRUCTION_BYTES
        if self._run(graph, count):
            raise ValueError(
                f"the graph of a step has {count} kernel calls; the limit is {CONSTANTS['MAX_INSTRUCTIONS']}"
            )

    def call(self, kernel: str, **arguments: Argument) -> None:
        """Run one kernel with `arguments` (see `instruction`), and wait for it."""
        self.run(self.instruction(kernel, arguments))


def structure(name: str) -> type[ctypes.Structure]:
    """Return a ctypes class for the struct `name` of kernels.h."""
    fields = [(field.name, ctypes.c_void_p if field.pointer else _NUMBERS[field.type]) for field in STRUCTS[name]]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def type_codes() -> dict[DType, int]:
    """Return the C constant of each dtype that plain weights or scale units can have."""
    return {tensors.float16: FLOAT16, tensors.bfloat16: BFLOAT16, tensors.float32: FLOAT32}


PLAIN = frozenset({int, float, bool, type(None)})  # Classes of arguments that are not tensors


def _pointee(field: Field) -> DType | None:
    return None if field.type == "void" else getattr(tensors, _POINTEES[field.type])


class Instruction(ctypes.Structure):
    """The C struct `instruction` of graph.h: address and arguments of a kernel.

    The field `waits` tells whether the next instruction starts only after this instruction has ended.
    """

    _fields_ = (("run", ctypes.c_void_p), ("waits", ctypes.c_int64), ("arguments", ctypes.c_uint8 * ARGUMENT_BYTES))


INSTRUCTION_BYTES = ctypes.sizeof(Instruction)


class _Kernel:
    """One kernel of the C library, which encodes its calls as instructions."""

    def __init__(self, name: str, address: ctypes.c_void_p) -> None:
        self._name, self._address = name, address.value
        fields = STRUCTS[f"{name}_arguments"]
        layout = "Pq" + "".join("P" if field.pointer else _CODES[field.type] for field in fields)
        padding = INSTRUCTION_BYTES - struct.calcsize(layout)
        self._instruction = struct.Struct(f"{layout}{padding}x")
        self._fields = {
            field.name: (field.pointer, field.nullable, _pointee(field) if field.pointer else None) for field in fields
        }

    def instruction(self, arguments: Mapping[str, Argument], waits: bool) -> bytes:
        """Return an instruction for a call (see `KernelLibrary.instruction`)."""
        if arguments.keys() != self._fields.keys():
            odd = ", ".join(sorted(arguments.keys() ^ self._fields.keys()))
            raise TypeError(f"{self._name}: arguments that are missing or unknown: {odd}")
        values: list[Argument] = []
        for name, (pointer, nullable, dtype) in self._fields.items():
            value = arguments[name]
            if value.__class__ in PLAIN:  # checked first, because `isinstance` with the abstract class `Tensor` is slow
                if pointer and not (value is None and nullable):
                    raise TypeError(f"{self._name}: {name} is {value}, not a tensor of {dtype}")
                values.append(0 if pointer else value)
            elif isinstance(value, Tensor):
                if not pointer or (dtype is not None and value.dtype != dtype):
                    expected = dtype if pointer else "a number"
                    raise TypeError(f"{self._name}: {name} is a tensor of {value.dtype}, expected {expected}")
                values.append(value.data_ptr())
            elif pointer:
                raise TypeError(f"{self._name}: {name} is {value}, not a tensor of {dtype}")
            else:
                values.append(value)
        try:
            return self._instruction.pack(self._address, waits, *values)
        except struct.error as error:
            raise TypeError(f"{self._name}: {error}; the arguments are {arguments}") from None


class Unavailable(Exception):
    """The native kernels cannot be used on this machine; the message gives the reason."""


@tensors.cached()
def native_kernels() -> KernelLibrary:
    """Return the native kernels, prebuilt or else compiled for this machine.

    The compilation may take minutes. Later calls return the same object.

    Raises:
        Unavailable: the system is not POSIX, or the installation has no prebuilt kernels that this machine can load,
            and the machine has no C compiler or the compilation failed.
    """
    if os.name != "posix":
        raise Unavailable("the native kernels need POSIX threads, which this system lacks; use Linux or macOS")
    if (path := prebuilt_library()) is not None:
        try:
            return KernelLibrary(ctypes.CDLL(str(path)), _digest(_LAYOUT), f"prebuilt for {path.stem}")
        except OSError as error:
            _log.warning(
                "prebuilt kernels not loaded path=%s error=%s; compiling the kernels instead",
                quoted(path),
                quoted(error),
            )
    compiler = c_compiler()
    if compiler is None:
        raise Unavailable("no C compiler found; install gcc or clang for faster answers")
    try:
        library = cache_root(None) / "kernels" / f"{_key(compiler)}.so"
        if not library.exists():
            # Several engines may start at once. Only one of them compiles.
            with _compile_lock(library):
                if not library.exists():
                    _log.info("compiling the native kernels path=%s", quoted(library))
                    compile_for_this_processor(compiler, library, heartbeat.beat, _COMPILER_SECONDS)
        return KernelLibrary(ctypes.CDLL(str(library)), _digest(_LAYOUT), "compiled for this machine")
    except subprocess.CalledProcessError as error:
        compiler_output = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr
        detail = compiler_output.strip().splitlines()[:1]
        raise Unavailable(f"the C compiler {compiler} failed: {detail[0] if detail else error}") from error
    except (OSError, ConfigError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the native kernels could not be built: {error}") from error


def _digest(names: tuple[str, ...]) -> str:
    return hashlib.sha256(b"\0".join((KERNELS / name).read_bytes() for name in names)).hexdigest()


def _key(compiler: str) -> str:
    """Return a library's name: a digest of sources, compiler, flags and processor."""
    # The digest contains the size and modification time of the compiler's file, but not the compiler's version. To get
    # the version, each start of an engine would have to run the compiler.
    program = Path(compiler).resolve()
    properties = program.stat()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        processor = platform.processor()
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.read_bytes())
    for item in (
        f"{program} {properties.st_size} {properties.st_mtime_ns}".encode(),
        " ".join((*FLAGS, *THIS_PROCESSOR)).encode(),
        processor.encode(),
        platform.machine().encode(),
    ):
        digest.update(b"\0" + item)
    return digest.hexdigest()[:32]


@contextmanager
def _compile_lock(library: Path) -> Iterator[None]:
    """Hold a file lock, so that only one of several engines compiles the library."""
    import fcntl

    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with library.with_suffix(".lock").open("w") as lock:
        # On a file system without locks, each engine compiles the library, and the last result replaces the others.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
