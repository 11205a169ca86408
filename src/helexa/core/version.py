"""Versions: of helexa, of its build (commit and time), and of the node's code."""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__version__ = "0.1.0"

_BUILD = Path(__file__).with_name("build.json")  # written by hatch_build.py; source trees have none
_ROOT = Path(__file__).parents[3]
_UNKNOWN = "unknown"
_GIT_SECONDS = 5
_SHA = re.compile(r"[0-9a-f]{7,64}")


class Build(NamedTuple):
    """Git commit and time of the build of the installed wheel."""

    git_sha: str = ""  # hash of the git commit; empty if unknown
    git_dirty: bool | None = None  # whether the checkout had uncommitted changes; None if unknown
    timestamp: str = ""  # time of the build in ISO format with time zone; empty if unknown


@cache
def build() -> Build:
    """Return commit and time of the installed wheel's build; unknown in a source tree."""
    # Modules that are slow to import are imported in the functions that need them, because every process of helexa
    # imports this file, and few processes call these functions.
    import json

    try:
        return Build(**json.loads(_BUILD.read_text()))
    except (OSError, ValueError, TypeError):
        return Build()


@cache
def build_identity() -> dict[str, Any]:
    """Return version, git commit and build time as JSON members of `GET /version`.

    The first call runs git if helexa runs from a git checkout. Later calls return the same result.
    """
    sha, dirty = _commit()
    return {
        "package_version": __version__,
        "git_sha": sha if sha == _UNKNOWN else sha[:7],
        "git_sha_long": sha,
        "git_dirty": dirty,
        "build_timestamp": build().timestamp or None,
    }


def version_line(program: str) -> str:
    """Return the text of `--version`: `cortex 0.1.0 (1a2b3c4, built 2026-11-26)`."""
    from datetime import datetime

    sha = build().git_sha[:7] + ("-dirty" if build().git_dirty else "")
    built = f"built {datetime.fromisoformat(build().timestamp).date()}" if build().timestamp else ""
    details = ", ".join(filter(None, (sha, built)))
    return f"{program} {__version__} ({details})" if details else f"{program} {__version__}"


@cache
def node_code_version() -> str:
    """Return helexa's version, and a digest of all Python and C files of the node.

    Hosts that compute a model together must have the same version.
    """
    import hashlib

    node = Path(__file__).parents[1] / "neuron"
    digest = hashlib.sha256()
    for path in sorted((*node.rglob("*.py"), *node.rglob("*.[ch]"))):
        digest.update(f"\0{path.relative_to(node).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return f"{__version__} {digest.hexdigest()[:16]}"


def _commit() -> tuple[str, bool | None]:
    """Return the git commit, and whether files have changes (None: unknown).

    The hash is `$HELEXA_BUILD_SHA` if set. Otherwise it comes from the build of the installed wheel, else from pip's
    record if pip installed helexa from a git repository, else from the git checkout. It is `_UNKNOWN` if none of these
    exists.
    """
    if not os.environ.get("HELEXA_BUILD_SHA") and _SHA.fullmatch(build().git_sha):
        return build().git_sha, build().git_dirty
    sha = os.environ.get("HELEXA_BUILD_SHA") or _commit_from_pip()
    if sha and _SHA.fullmatch(sha):
        return sha, None
    if not ((_ROOT / ".git").exists() and (_ROOT / "pyproject.toml").exists()):
        return _UNKNOWN, None
    try:
        return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, ValueError):
        return _UNKNOWN, None


def _commit_from_pip() -> str | None:
    import json
    from importlib import metadata

    try:
        text = metadata.distribution("helexa").read_text("direct_url.json")
        return json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
    except (metadata.PackageNotFoundError, ValueError):
        return None


def _git(*arguments: str) -> str:
    """Return the output of `git` with `arguments` in the source tree."""
    import subprocess

    command = ["git", "--no-optional-locks", "-C", str(_ROOT), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_SECONDS)
    except subprocess.SubprocessError as error:
        raise ValueError(str(error)) from None
    return run.stdout.strip()
