"""Distinguishes connection errors that this machine causes from errors of the remote machine."""

import errno
import os

OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_LOCAL = OUT_OF_DESCRIPTORS | {errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}  # EADDRNOTAVAIL: no local port is free


def is_local_error(error: Exception) -> bool:
    """Return whether a connection failed because this machine ran out of file descriptors, ports or memory.

    An error of name resolution does not tell whether the process ran out of file descriptors. The function therefore
    also tests whether a file can still be opened.
    """
    return (isinstance(error, OSError) and error.errno in _LOCAL) or not _descriptor_left()


def _descriptor_left() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _LOCAL
    return True
