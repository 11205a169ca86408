"""The version of helexa, and the commit and time of its build."""

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

__version__ = "0.1.0"

_BUILD = Path(__file__).with_name("build.json")  # written by hatch_build.py; source trees have none


class Build(NamedTuple):
    """The origin of an installed wheel.

    Attributes:
        git_sha: hash of the git commit; empty if unknown.
        git_dirty: whether the checkout had uncommitted changes; None if unknown.
        timestamp: time of the build in ISO format with time zone; empty if unknown.
    """

    git_sha: str = ""
    git_dirty: bool | None = None
    timestamp: str = ""


@cache
def build() -> Build:
    """Return commit and time of the build. In a source tree or an editable installation, both are unknown."""
    try:
        return Build(**json.loads(_BUILD.read_text()))
    except (OSError, ValueError, TypeError):
        return Build()


def version_line(program: str) -> str:
    """Return the text of `PROGRAM --version`, such as `cortex 0.1.0 (1a2b3c4, built 2026-11-26)`."""
    commit = build().git_sha[:7] + ("-dirty" if build().git_dirty else "")
    built = f"built {datetime.fromisoformat(build().timestamp).date()}" if build().timestamp else ""
    details = ", ".join(filter(None, (commit, built)))
    return f"{program} {__version__} ({details})" if details else f"{program} {__version__}"
