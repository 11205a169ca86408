"""The other engines (peers) of `compare.py`, and their installation.

Two peers are compiled for the machine. The wheel of ik-llama-cpp-python in the package index has only AVX2 code, so
`install` compiles its source archive.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

_VNNI = "avx512_vnni"  # the name of the instruction set in /proc/cpuinfo
_VNNI_INSTRUCTION = re.compile(r"\bvpdpbusd\b.*%zmm")

# With flash attention only for the types of keys and values that a default context has, compiling takes half the time.
_CMAKE_ARGS = "-DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF"

# Replaces the file of ik-llama-cpp-python's source archive, which also builds programs, and lacks a file for them.
_IK_CMAKE = """\
cmake_minimum_required(VERSION 3.21)
project(ik_llama_cpp_python LANGUAGES C CXX)
set(CMAKE_INSTALL_RPATH "$ORIGIN")
add_subdirectory(vendor/ik_llama.cpp EXCLUDE_FROM_ALL)
add_custom_target(libraries ALL DEPENDS llama ggml)
install(TARGETS llama ggml LIBRARY DESTINATION ik_llama_cpp/lib)
"""


@dataclass(frozen=True)
class Source:
    """A source archive in the package index.

    Attributes:
        version: version of the package.
        sha256: checksum of the archive.
        cmake: text that replaces the archive's `CMakeLists.txt`.
    """

    version: str
    sha256: str
    cmake: str


@dataclass(frozen=True)
class Peer:
    """Another engine to compare with.

    Attributes:
        script: the script that measures the engine, a file in `perf/peers/`.
        package: name of its Python package.
        library: file name of the library with the matrix products, if it is compiled for one set of instructions. Empty
            if it chooses its code when it starts.
        source: the source archive to compile; None to let pip choose the package.
    """

    script: str
    package: str
    library: str = ""
    source: Source | None = None

    def version(self, python: str) -> str | None:
        """Return the version of the peer's package in the Python interpreter `python`, or None if it is missing."""
        return _answer(python, f"import importlib.metadata as m; print(m.version({self.package!r}))")

    def description(self, python: str) -> str | None:
        """Return the version, and a note if the package was not compiled for the machine's instruction sets."""
        version = self.version(python)
        if version is None or self.native(python) is not False:
            return version
        return f"{version} without AVX-512 VNNI"

    def native(self, python: str) -> bool | None:
        """Return whether the package in the Python interpreter `python` uses the machine's AVX-512 VNNI, if any.

        Return None if the program `objdump` is not installed, which finds the instructions.
        """
        if not self.library or _VNNI not in _cpu_flags():
            return True
        module = self.package.replace("-", "_").removesuffix("_python")
        code = f"import importlib.util as u; print(u.find_spec({module!r}).submodule_search_locations[0])"
        folder = _answer(python, code)
        return False if folder is None else _has_vnni(Path(folder, "lib", self.library))

    def install(self, folder: Path) -> str:
        """Install the peer's package in a virtual environment in `folder`, unless it is there. Return its Python.

        Raises:
            SystemExit: the package was compiled without the machine's instruction sets, or `objdump` is not installed.
        """
        python = str(folder / "bin" / "python")
        if self.version(python) is None or not self.native(python):
            print(f"installing {self.package} into {folder}", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            _pip(
                python,
                "install",
                str(_unpacked(python, self.package, self.source, folder)) if self.source else self.package,
            )
            native = self.native(python)
            if native is None:
                raise SystemExit("objdump is not installed; install binutils")
            if not native:
                raise SystemExit(f"{folder}: {self.package} was compiled without AVX-512 VNNI, which this machine has")
        return python


PEERS = {
    "llama.cpp": Peer("peer_llama_cpp.py", "llama-cpp-python", library="libggml-cpu.so"),
    "ik_llama.cpp": Peer(
        "peer_llama_cpp.py",
        "ik-llama-cpp-python",
        library="libggml.so",
        source=Source("0.1.5", "33c67eb99e4dcab5e611050433243815709b8b3067753f9ce18375013cf002ad", _IK_CMAKE),
    ),
    "openvino": Peer("peer_openvino.py", "openvino-genai"),
}


def _answer(python: str, code: str) -> str | None:
    """Run `code` in the Python interpreter `python`, and return its output, or None if there is none."""
    try:
        completed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None


def _pip(python: str, command: str, *arguments: str) -> None:
    """Run pip at low priority, because compiling takes all cores for minutes."""
    environment = os.environ | {"CMAKE_ARGS": _CMAKE_ARGS}
    pip = ["nice", python, "-m", "pip", command, "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(pip, check=True, stdout=sys.stderr, env=environment)


def _unpacked(python: str, package: str, source: Source, folder: Path) -> Path:
    """Download a source archive into `folder`, check its checksum, unpack it, and return the unpacked folder."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{package}=={source.version} --hash=sha256:{source.sha256}\n")
    _pip(python, "download", "--no-deps", "--no-binary", package, "-d", str(folder), "-r", str(requirements))
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    (unpacked / "CMakeLists.txt").write_text(source.cmake)
    return unpacked


def _has_vnni(library: Path) -> bool | None:
    """Return whether a library contains a VNNI instruction with 512-bit registers; None without `objdump`."""
    if shutil.which("objdump") is None:
        return None
    with subprocess.Popen(["objdump", "-d", str(library)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = any(map(_VNNI_INSTRUCTION.search, process.stdout))
        process.kill()
    return found


def _cpu_flags() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return []
    return next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
