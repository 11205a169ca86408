"""Locks of model files: `helexa rm` does not remove models in use or in download."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK  # without waiting, if the file is a FIFO


def try_lock(descriptor: int) -> bool:
    """Take an exclusive lock on a file; return False if another process has a lock.

    On file systems without locks, return True. On NFS, the descriptor must be writable.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def mark_used(model: Path) -> None:
    """Take a shared lock on a model's file or folder until this process ends.

    On file systems without locks, the function does nothing.
    """
    with suppress(OSError):
        # The descriptor stays open. The lock is released when the process ends.
        descriptor = os.open(model, os.O_RDONLY | _FLAGS)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_used(model: Path) -> bool:
    """Return whether an engine process has locked a model with `mark_used`."""
    try:
        try:
            descriptor = os.open(model, os.O_RDWR | _FLAGS)  # NFS locks only writable descriptors exclusively
        except OSError:  # a folder, or a file that this user cannot write
            descriptor = os.open(model, os.O_RDONLY | _FLAGS)
    except OSError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)
