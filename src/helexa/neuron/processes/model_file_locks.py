"""Locks of model files in use, which `helexa rm` does not remove."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # without waiting, if the file is a FIFO


def mark_used(model: Path) -> None:
    """Take a shared lock on a model's file or folder until this process ends.

    On file systems without locks, the function does nothing.
    """
    with suppress(OSError):
        # The descriptor stays open. The lock is released when the process ends.
        descriptor = os.open(model, _FLAGS)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_used(model: Path) -> bool:
    """Return whether an engine process has locked a model with `mark_used`."""
    try:
        descriptor = os.open(model, _FLAGS)
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
