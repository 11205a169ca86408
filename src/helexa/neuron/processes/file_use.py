"""Mark model files that engines on this machine use, so that `helexa rm` does not remove these files."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def mark_used(model: Path) -> None:
    """Mark a model's file or folder as used until this process ends.

    The mark is a shared file lock. On file systems without locks, the model stays unmarked.
    """
    with suppress(OSError):
        # stays open: the lock is released when the process ends
        descriptor = os.open(model, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_used(model: Path) -> bool:
    """Return whether an engine has marked a model's file or folder as used."""
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
