"""Compilation of the C kernels in `kernels/` to a shared library.

The build hook of the wheel (`hatch_build.py`) also uses this module. The module therefore imports only the standard
library.
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

KERNELS = Path(__file__).parents[1] / "kernels"
# With `-ffp-contract=off`, the compiler does not fuse products and sums, so all code paths of a kernel round alike.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
COMPILER_SECONDS = 120


def sources() -> list[Path]:
    """Return the C files and headers of the kernels."""
    return sorted(KERNELS.glob("*.[ch]"))


def compile_library(
    compiler: Sequence[str], target_flags: Sequence[str], library: Path, compiled: Callable[[], None] = lambda: None
) -> None:
    """Compile all C files in parallel, and link them to the file `library`.

    Args:
        compiler: command of the C compiler, without arguments for the kernels.
        target_flags: flags that choose the processor.
        library: path of the result, in an existing folder. The file appears only when it is complete.
        compiled: function that is called after each compiled file.

    Raises:
        subprocess.CalledProcessError: the compiler failed; `stderr` has its messages.
        OSError: the compiler could not be started, or a file could not be written.
        subprocess.TimeoutExpired: the compiler took more than 120 s for one file.
    """
    with TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}.") as folder:

        def compile_one(source: Path) -> str:
            built = str(Path(folder, source.stem).with_suffix(".o"))
            _run([*compiler, *FLAGS, *target_flags, "-c", str(source), "-o", built])
            compiled()
            return built

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_one, (path for path in sources() if path.suffix == ".c")))
        partial = Path(folder, library.name)
        _run([*compiler, "-shared", "-pthread", *objects, "-o", str(partial), "-lm"])
        partial.replace(library)


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILER_SECONDS)
