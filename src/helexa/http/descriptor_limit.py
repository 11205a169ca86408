"""The limit on open file descriptors of this process."""

import resource
from contextlib import suppress

# Child processes may loop over all descriptors up to the limit, which can be 2**30 in a container.
_MOST_DESCRIPTORS = 1 << 16


def raise_descriptor_limit() -> int:
    """Raise the soft limit on open files to the hard limit, at most 65,536; return the soft limit in effect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS allows less than the hard limit that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """Return the soft limit on open files, at most 65,536."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MOST_DESCRIPTORS)
