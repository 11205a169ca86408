"""The host's memory, as far as this process and its engines may use it."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def host_memory(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """Bytes that are free, and that there are in all: of the machine, or of the container if it may have less.

    Args:
        cgroup: folder of the control group, version 2.
    """
    machine = psutil.virtual_memory()
    limit = _number(cgroup / "memory.max")
    if limit is None or limit >= machine.total:
        return machine.available, machine.total
    used = _number(cgroup / "memory.current") or 0
    return min(machine.available, max(0, limit - used + _reclaimable(cgroup))), limit


def _reclaimable(cgroup: Path) -> int:
    """Bytes of files that are merely cached; they are given up when somebody needs the room."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    """What the file says, None if it is not there or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
