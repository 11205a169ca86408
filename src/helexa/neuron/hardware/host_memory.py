"""The host's memory, as far as this process and its engines may use it."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_RECLAIMABLE = ("inactive_file ", "active_file ", "slab_reclaimable ")


def host_memory(cgroup: Path = _CGROUP, group: str | None = None) -> tuple[int, int]:
    """Bytes that are free, and that there are in all: of the machine, or of what its container or service may have.

    Args:
        cgroup: folder of all control groups, version 2.
        group: this process's below it; None for what the system says.
    """
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    folder = cgroup / (_own_group() if group is None else group)
    for each in (folder, *folder.parents):  # whatever is stated further up holds as well
        limit = _number(each / "memory.max") if each.is_relative_to(cgroup) else None
        if limit is not None and limit < machine.total:
            used = _number(each / "memory.current") or 0
            free, total = min(free, max(0, limit - used + _reclaimable(each))), min(total, limit)
    return free, total


def own_bytes(pid: int) -> int | None:
    """Memory that a process holds and that cannot be read from a file again; None if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        try:
            return psutil.Process(pid).memory_info().rss
        except psutil.Error:
            return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _own_group() -> str:
    """The control group of this process, relative to that of all; empty if it has none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")


def _reclaimable(cgroup: Path) -> int:
    """Bytes that are merely cached, of files and by the kernel; they are given up when somebody needs the room."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(_RECLAIMABLE))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    """What the file says, None if it is not there or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
