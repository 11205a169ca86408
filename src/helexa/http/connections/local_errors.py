"""Recognize connection errors caused by this machine rather than by the other end."""

import errno
import os

OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_LOCAL = OUT_OF_DESCRIPTORS | {errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}  # EADDRNOTAVAIL: no local port is free


def is_local_error(error: Exception) -> bool:
    """Return whether a connection failed because this machine is out of descriptors, ports or memory.

    A failed name lookup hides its cause, so this function also tests whether a descriptor can be opened.
    """
    return (isinstance(error, OSError) and error.errno in _LOCAL) or not _descriptor_left()


def _descriptor_left() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _LOCAL
    return True
