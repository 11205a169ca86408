"""The folder where the command line keeps what outlives one run."""

import os
from pathlib import Path


def state_folder(*names: str) -> Path:
    """`$XDG_STATE_HOME/helexa`, else `~/.local/state/helexa`, or a folder below it; created for this user alone."""
    base = os.environ.get("XDG_STATE_HOME")
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local" / "state"
    for name in ("helexa", *names):
        folder /= name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
