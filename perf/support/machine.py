"""Describes the machine, the git commit and the software versions of a measurement."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import psutil

# CPU flags that affect kernels: vector width, products of 8-bit integers and of bfloat16, matrix tiles.
_FLAGS = [
    "avx2",
    "f16c",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
]
_REPOSITORY = Path(__file__).parents[2]


def machine() -> dict[str, object]:
    """Return processor, instruction sets, cores, memory and operating system of this machine."""
    fields = _processor()
    flags = fields.get("flags", fields.get("Features", "")).split()
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": platform.platform(),
    }


def commit() -> dict[str, object] | None:
    """Return helexa's current git commit and whether tracked files are modified. None without a git repository."""
    head = _output("git", "-C", str(_REPOSITORY), "rev-parse", "HEAD")
    if not head:
        return None
    changes = _output("git", "-C", str(_REPOSITORY), "status", "--porcelain", "--untracked-files=no")
    return {"id": head, "changed": bool(changes)}


def versions() -> dict[str, str | None]:
    """Return the versions of helexa, torch, Python, and the C compiler for helexa's native kernels."""
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    return {
        "helexa": importlib.metadata.version("helexa"),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "compiler": _output(compiler, "--version").partition("\n")[0] if compiler else None,
    }


def _processor() -> dict[str, str]:
    """Return the fields of the first processor in `/proc/cpuinfo`. Empty if the system has no such file."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _output(*command: str) -> str:
    """Return the output of a command, or an empty text if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
