"""Anonymous memory that several processes map."""

import fcntl
import os
import tempfile

_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4  # of <linux/fcntl.h>; Python names them only from 3.12 on


def create(name: str, size: int) -> int:
    """Return the file descriptor of `size` bytes of new, zeroed memory, which another process can map.

    On Linux, the size cannot change afterwards, so a process that has mapped the memory can always access it. The
    operating system allocates physical memory only when a page is first written.

    Args:
        name: name of the memory, shown by tools that list the descriptors of a process.
    """
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
        return descriptor
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
    return descriptor
