"""Lock the model files that engines on this machine use. `helexa rm` does not remove locked files."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def mark_used(model: Path) -> None:
    """Take a shared lock on a model's file or folder until this process ends.

    On file systems without locks, the function does nothing.
    """
    with suppress(OSError):
        # The descriptor stays open. The lock is released when the process ends.
        descriptor = os.open(model, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_used(model: Path) -> bool:
    """Return whether an engine process uses a model's file or folder, which it has locked with `mark_used`."""
    try:
        descriptor = os.open(model, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
