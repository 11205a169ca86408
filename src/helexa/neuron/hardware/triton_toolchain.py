"""Check whether Triton finds the C compiler and headers that it needs."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from helexa.neuron.cache_folder import cache_root

# glob pattern of the C helper library that Triton compiles for this Python version into its cache folder
_LIBRARY = f"*/cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"


def triton_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in which Triton stores compiled kernels."""
    return Path(environ.get("TRITON_CACHE_DIR") or cache_root(None, environ) / "triton")


def triton_missing(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return what Triton lacks to compile kernels, and the remedy; None if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if any(triton_cache(environ).glob(_LIBRARY)):
        return None
    compilers = [environ["CC"]] if environ.get("CC") else ["gcc", "clang", "cc"]
    if not any(shutil.which(name, path=environ.get("PATH")) for name in compilers):
        return "Triton finds no C compiler: install gcc or clang, or set CC"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"Triton finds no Python.h: install the headers of Python {version} (python{version}-dev)"
    return None
