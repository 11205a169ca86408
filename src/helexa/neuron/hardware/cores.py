"""The number of CPU cores that this process can use."""

import os

import psutil


def physical_cores() -> int:
    """Return the number of physical CPU cores, or the number of CPUs that this process may use if this is smaller."""
    allowed = usable_cpus()
    return max(min(psutil.cpu_count(logical=False) or allowed, allowed), 1)


def usable_cpus() -> int:
    """Return the number of CPUs (hardware threads) that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
