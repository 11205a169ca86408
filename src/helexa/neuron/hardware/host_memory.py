"""The host memory (RAM) that this process and its engines may use."""

import re
from pathlib import Path

from helexa.neuron.hardware.cpus import FOLDER, OWN_GROUPS, control_groups, text_of

_MEMORY = Path("/proc/meminfo")
_ENTRY = re.compile(r"^(MemTotal|MemAvailable): *(\d+) kB$", re.MULTILINE)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# `memory.high` counts as a limit: above it, the kernel does not kill a process, but slows it down to reclaim memory.
_LIMITS, _USED = ("memory.max", "memory.high", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes")
# Names in `memory.stat` of memory that the kernel can reclaim. The sums must include a group's child groups. In version
# 1 of control groups, only the names with `total_` include them.
_RECLAIMABLE = ("inactive_file ", "active_file ", "slab_reclaimable ")
_RECLAIMABLE_V1 = ("total_inactive_file ", "total_active_file ")


def host_memory(folder: Path = FOLDER, own_groups: Path = OWN_GROUPS) -> tuple[int, int]:
    """Return the free and the total bytes that this process may use.

    The control groups of the process limit both numbers. The arguments are those of `control_groups`.
    """
    free, total = _machine_memory()
    for group, limit in _limits(total, folder, own_groups):
        used = max(_numbers(group, _USED), default=0)
        free, total = min(free, max(0, limit - used + _reclaimable(group))), min(total, limit)
    return free, total


def memory_id(folder: Path = FOLDER, own_groups: Path = OWN_GROUPS) -> str | None:
    """Return an id that is equal for processes that share the same host memory.

    The id is a hash of the id of the machine's boot, and of the control group with the lowest limit. It reveals nothing
    else about the machine. The result is None if the files of Linux with these values cannot be read.
    """
    import hashlib  # loads OpenSSL, which only servers need

    try:
        boot = _BOOT_ID.read_bytes().strip()
        limits = _limits(_machine_memory()[1], folder, own_groups)
        group = min(limits, key=lambda entry: entry[1])[0].stat().st_ino if limits else 0
    except OSError:
        return None
    return hashlib.sha256(b"helexa memory %b %d" % (boot, group)).hexdigest()[:16]


def _machine_memory() -> tuple[int, int]:
    """Return the available and the total bytes of the machine."""
    entries = {name: int(size) << 10 for name, size in _ENTRY.findall(text_of(_MEMORY))}
    if len(entries) == 2:
        return entries["MemAvailable"], entries["MemTotal"]
    import psutil  # slow to import, and not needed on Linux

    machine = psutil.virtual_memory()
    return machine.available, machine.total


def _limits(total: int, folder: Path, own_groups: Path) -> list[tuple[Path, int]]:
    """Return the control groups that limit memory below `total`, each with its limit."""
    groups = control_groups("memory", folder, own_groups)
    limits = [(group, min(_numbers(group, _LIMITS), default=total)) for group in groups]
    return [(group, limit) for group, limit in limits if limit < total]


def own_bytes(pid: int) -> int | None:
    """Return the host memory of process `pid` in bytes; None if the process ended."""
    # Mapped files, such as model weights, do not count on Linux, because the kernel can read them from disk again.
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        import psutil  # slow to import, and not needed for a running process on Linux

        try:
            return psutil.Process(pid).memory_info().rss
        except psutil.Error:
            return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def engine_bytes(pid: int) -> int | None:
    """Return the `own_bytes` of an engine and its children; None if the engine ended."""
    own = own_bytes(pid)
    return None if own is None else own + sum(own_bytes(child) or 0 for child in _children(pid))


def _children(pid: int) -> list[int]:
    """Return the ids of the processes that the main thread of process `pid` started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _reclaimable(group: Path) -> int:
    """Return the bytes of a control group's caches, which the kernel can free."""
    lines = text_of(group / "memory.stat").splitlines()
    names = _RECLAIMABLE_V1 if any(line.startswith(_RECLAIMABLE_V1) for line in lines) else _RECLAIMABLE
    try:
        return sum(int(line.split()[1]) for line in lines if line.startswith(names))
    except ValueError:
        return 0


def _numbers(group: Path, names: tuple[str, ...]) -> list[int]:
    """Return the numbers in the files `names` of a control group.

    Missing files, and files with the text `max` (no limit), are left out.
    """
    texts = (text_of(group / name) for name in names)
    return [int(text) for text in texts if text.isdecimal()]
