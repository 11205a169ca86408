"""Reads and raises the process's limit on open file descriptors."""

import resource
from contextlib import suppress

# Child processes may loop over all descriptors up to the limit, which can be 2**30 in a container.
_MAX_DESCRIPTORS = 1 << 16


def raise_descriptor_limit() -> int:
    """Raise the soft limit on open files to the hard limit, but to at most 65,536. Return the resulting soft limit."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    target_limit = _MAX_DESCRIPTORS if hard_limit == resource.RLIM_INFINITY else min(hard_limit, _MAX_DESCRIPTORS)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < target_limit:
        with suppress(ValueError, OSError):  # macOS allows less than the hard limit that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (target_limit, hard_limit))
    return descriptor_limit()


def descriptor_limit() -> int:
    """Return the process's soft limit on open files, or 65,536 if the limit is larger."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_DESCRIPTORS if soft_limit == resource.RLIM_INFINITY else min(soft_limit, _MAX_DESCRIPTORS)
