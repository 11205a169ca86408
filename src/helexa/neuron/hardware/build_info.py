"""Versions of helexa and its dependencies, determined without importing the dependencies."""

import json
import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from helexa.core.version import __version__, build

UNKNOWN = "unknown"
_ROOT = Path(__file__).parents[4]
_GIT_SECONDS = 5
_SHA = re.compile(r"[0-9a-f]{7,64}")


@cache
def build_facts() -> dict[str, Any]:
    """Return the JSON members of the response to `GET /version`: the versions of helexa, Python, torch and Triton.

    The first call runs git if helexa runs from a git checkout. Later calls return the same result.
    """
    sha, dirty = _commit()
    torch = _torch_facts()
    return {
        "package_version": __version__,
        "git_sha": sha if sha == UNKNOWN else sha[:7],
        "git_sha_long": sha,
        "git_dirty": dirty,
        "build_timestamp": build().timestamp or None,
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


def _commit() -> tuple[str, bool | None]:
    """Return the hash of helexa's git commit, and whether tracked files have uncommitted changes (None: unknown).

    The hash is `$HELEXA_BUILD_SHA` if set. Otherwise it comes from the build of the installed wheel, else from pip's
    record if pip installed helexa from a git repository, else from the git checkout. It is `UNKNOWN` if none of these
    exists.
    """
    if not os.environ.get("HELEXA_BUILD_SHA") and _SHA.fullmatch(build().git_sha):
        return build().git_sha, build().git_dirty
    sha = os.environ.get("HELEXA_BUILD_SHA") or _commit_from_pip()
    if sha and _SHA.fullmatch(sha):
        return sha, None
    if not ((_ROOT / ".git").exists() and (_ROOT / "pyproject.toml").exists()):
        return UNKNOWN, None
    try:
        return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN, None


def _commit_from_pip() -> str | None:
    try:
        text = metadata.distribution("helexa").read_text("direct_url.json")
        return json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    except (metadata.PackageNotFoundError, ValueError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(_ROOT), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS)
    return run.stdout.strip()


def _torch_facts() -> dict[str, str]:
    """Return the string constants in the file `torch/version.py` by name, without importing torch."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (OSError, metadata.PackageNotFoundError):
        return {}
    return dict(re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE))
