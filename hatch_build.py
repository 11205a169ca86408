"""Build hook of hatchling: records the commit and the time of the build, and adds prebuilt kernels to the wheel.

Environment variables:
    HELEXA_PREBUILT_KERNELS: if 1, compile the C kernels for all levels of processors and build a platform wheel.
        Otherwise the wheel is pure Python, and its kernels are compiled on first use.
    CC: command of the C compiler. A cross compiler needs HELEXA_TARGET_MACHINE.
    HELEXA_TARGET_MACHINE: machine type for which `CC` compiles, `x86_64` or `aarch64`; by default this machine's.
    HELEXA_BUILD_SHA: hash of the commit, for builds outside a git checkout.
    SOURCE_DATE_EPOCH: time of the build in seconds since 1970, for reproducible builds.
"""

import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = "helexa/core/build.json"
_NATIVE = "helexa/neuron/ops/native"
_GIT_SECONDS = 30
_OLDEST_GLIBC = 17  # minor version; pip knows no manylinux tag below 2.17 for all machine types


class BuildHook(BuildHookInterface):
    """Adds `core/build.json` to wheels and source distributions, and prebuilt kernels to wheels."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Create the generated files in a temporary folder, and tell hatchling to include them."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="helexa-build.")
        folder, root = Path(self._folder.name), Path(self.root)
        if not (root / "src" / _BUILD).exists():  # a source distribution has the file of its own build
            path = folder / "build.json"
            path.write_text(json.dumps(_build(root)))
            build_data["force_include"][str(path)] = _BUILD if self.target_name == "wheel" else f"src/{_BUILD}"
        if self.target_name == "wheel" and os.environ.get("HELEXA_PREBUILT_KERNELS") == "1":
            machine = os.environ.get("HELEXA_TARGET_MACHINE") or platform.machine()
            libraries = _compile_kernels(root, machine, folder)
            for library in libraries:
                build_data["force_include"][str(library)] = f"{_NATIVE}/libraries/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-manylinux_2_{_glibc(libraries)}_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the generated files."""
        if version != "editable":
            self._folder.cleanup()


def _build(root: Path) -> dict[str, Any]:
    """Return the fields of `helexa.core.version.Build`."""
    sha, dirty = os.environ.get("HELEXA_BUILD_SHA", ""), None
    if not sha and (root / ".git").exists():
        sha = _git(root, "rev-parse", "HEAD")
        dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    return {"git_sha": sha, "git_dirty": dirty, "timestamp": datetime.fromtimestamp(seconds, UTC).isoformat()}


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout.strip()


def _compile_kernels(root: Path, machine: str, folder: Path) -> list[Path]:
    """Return the libraries of all levels of `machine`, compiled into `folder`."""
    compilation = _compilation(root)
    compiler = shlex.split(os.environ.get("CC") or "cc")
    libraries = []
    for level in compilation.LEVELS:
        if level.machine == machine:
            library = folder / f"{level.name}.so"
            try:
                compilation.compile_library(compiler, level.flags, library)
            except subprocess.CalledProcessError as error:
                raise SystemExit(
                    f"{compiler[0]} cannot compile the kernels for {level.name}:\n{error.stderr}"
                ) from None
            except OSError as error:
                raise SystemExit(f"{compiler[0]} cannot compile the kernels for {level.name}: {error}") from None
            libraries.append(library)
    if not libraries:
        raise SystemExit(f"there are no prebuilt kernels for {machine}; unset HELEXA_PREBUILT_KERNELS")
    return libraries


def _compilation(root: Path) -> ModuleType:
    """Import the module `compilation`, which needs only the standard library, without its package."""
    spec = importlib.util.spec_from_file_location("compilation", root / "src" / _NATIVE / "compilation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _glibc(libraries: list[Path]) -> int:
    """Return the minor version of the oldest glibc 2 that has all symbols that the libraries use."""
    symbols = (re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes()) for library in libraries)
    return max(_OLDEST_GLIBC, *(int(minor) for found in symbols for minor in found))
