"""The folder in which the `helexa` command stores files such as logs and the chat history."""

import os
from pathlib import Path


def state_folder(*names: str) -> Path:
    """Return the folder for stored files, or its subfolder `names`. Missing folders are created with mode 0700.

    The folder is `$XDG_STATE_HOME/helexa`, or `~/.local/state/helexa` if the variable is not set.
    """
    base = os.environ.get("XDG_STATE_HOME")
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local" / "state"
    for name in ("helexa", *names):
        folder /= name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def write_private(path: Path, text: str) -> None:
    """Write `text` to a file that only this user can read."""
    path.unlink(missing_ok=True)  # an existing file would keep its permissions
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
