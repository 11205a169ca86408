"""The host memory (RAM) that this process and its engines may use."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_RECLAIMABLE = ("inactive_file ", "active_file ", "slab_reclaimable ")


def host_memory(cgroup: Path = _CGROUP, own_group: str | None = None) -> tuple[int, int]:
    """Return the free bytes and the total bytes of host memory that this process may use.

    Both are limited by the Linux control groups (cgroups) of the process, for example those of its container.

    Args:
        cgroup: root folder of the control groups, version 2.
        own_group: path of this process's control group below `cgroup`; None to read it from `/proc`.
    """
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    folder = cgroup / (_own_group() if own_group is None else own_group)
    for current in (folder, *folder.parents):  # limits of parent groups apply as well
        limit = _number(current / "memory.max") if current.is_relative_to(cgroup) else None
        if limit is not None and limit < machine.total:
            used = _number(current / "memory.current") or 0
            free, total = min(free, max(0, limit - used + _reclaimable(current))), min(total, limit)
    return free, total


def own_bytes(pid: int) -> int | None:
    """Return the anonymous and shared memory of the process `pid`, in bytes; None if the process does not exist.

    Mapped files, such as model weights, do not count on Linux, because the kernel can read them from disk again.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        try:
            return psutil.Process(pid).memory_info().rss
        except psutil.Error:
            return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def engine_bytes(pid: int) -> int | None:
    """Return `own_bytes` of an engine process and of the processes that it has started, such as further ranks."""
    own = own_bytes(pid)
    return None if own is None else own + sum(own_bytes(child) or 0 for child in _children(pid))


def _children(pid: int) -> list[int]:
    """Return the processes that the main thread of the process `pid` has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _own_group() -> str:
    """Return the path of this process's control group below the root group; empty if unknown."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")


def _reclaimable(cgroup: Path) -> int:
    """Return the bytes of file and kernel caches in the control group `cgroup`, which the kernel frees on demand."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(_RECLAIMABLE))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    """Return the number in the file `path`; None if the file is missing or contains no number (`max`: no limit)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
