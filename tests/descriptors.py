"""Context managers: more open file descriptors than `select()` supports, and no free descriptors."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 1100


@contextmanager
def many_descriptors() -> Iterator[None]:
    """Open enough descriptors that every new descriptor is above 1023."""
    with _soft_limit(MANY + 2000):
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
        try:
            yield
        finally:
            for fd in opened:
                os.close(fd)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Open all descriptors that this process may have."""
    opened = [os.open(os.devnull, os.O_RDONLY)]
    with _soft_limit(opened[0] + 20):
        try:
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        try:
            yield
        finally:
            for fd in opened:
                os.close(fd)


@contextmanager
def _soft_limit(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
