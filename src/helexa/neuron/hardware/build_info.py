"""Versions of helexa and its dependencies, determined without importing the dependencies."""

import platform
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from helexa.core.version import build_identity


@cache
def build_facts() -> dict[str, Any]:
    """Return the JSON members of the response to `GET /version`: the versions of helexa, Python, torch and Triton.

    The first call runs git if helexa runs from a git checkout. Later calls return the same result.
    """
    torch = _torch_facts()
    return build_identity() | {
        "python_version": platform.python_version(),
        "torch_version": installed_version("torch"),
        "torch_cuda": torch.get("cuda"),
        "torch_hip": torch.get("hip"),
        "triton_version": installed_version("triton") or None,
        "target": f"{platform.machine()}-{sys.platform}",
    }


def installed_version(package: str) -> str:
    """Return the version of the installed Python package `package`; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _torch_facts() -> dict[str, str]:
    """Return the string constants in the file `torch/version.py` by name, without importing torch."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (OSError, metadata.PackageNotFoundError):
        return {}
    return dict(re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE))
