"""Memory granted to engines, so that two loads do not get the same memory."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from helexa.core.errors import DoesNotFitError
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.loading.memory_division import divide
from helexa.neuron.hardware.host_memory import engine_bytes

log = logging.getLogger(__name__)

_CPU = ("cpu",)


@dataclass
class _Holding:
    """The memory granted to one engine, in bytes."""

    devices: tuple[str, ...]
    promised: int
    # Start time of the engine process. A later process with the same process id has another start time.
    start_time: float
    base: int  # bytes that the engine process used when it requested memory
    allocated: int = 0
    settled: bool = False  # whether a GPU engine has finished loading; all granted memory then counts as allocated
    # granted bytes that the engine had not allocated and that were not free at the last call of `MemoryGrants.observe`
    missing: int = 0

    def uses(self, device: str) -> bool:
        """Return whether the engine holds memory of `device`."""
        return any(_same_memory(own, device) for own in self.devices)


class MemoryGrants:
    """Grants memory to engines. A grant ends when the engine's process ends.

    An engine with ranks on several devices takes the granted memory on each of the devices.

    Engines allocate their granted memory gradually. Until then, the machine reports this memory as free. This class
    therefore subtracts the granted bytes that are not allocated yet from the free memory before the next grant.

    Args:
        reserve: bytes of free memory that are never granted.
        private_bytes: function that returns the bytes of private memory of the process with a given id, or None if
            there is no such process.
        started_at: function that returns the start time of the process with a given id, or None if there is no such
            process.
    """

    def __init__(
        self,
        reserve: int = 0,
        *,
        private_bytes: Callable[[int], int | None] | None = None,
        started_at: Callable[[int], float | None] | None = None,
    ) -> None:
        self._reserve = reserve
        self._private_bytes = private_bytes or engine_bytes
        self._started_at = started_at or _start_time_of
        self._holdings: dict[int, _Holding] = {}

    def grant(self, pid: int, request: MemoryRequest, least_pages: int = 0) -> MemoryGrant:
        """Decide how much memory the engine process `pid` may use.

        An earlier grant to the same engine ends, even if the method raises an error.

        Args:
            least_pages: minimum number of KV pages. If fewer fit in the free memory, the method raises an error.

        Raises:
            DoesNotFitError: the free memory is too small. `details["permanent"]` says whether it would also be too
                small if no other engine ran.
        """
        previous = self._holdings.pop(pid, None)
        devices = tuple(request.devices) or (request.device,)
        available = min(self.available(device, request.free, request.limit) for device in devices)
        try:
            granted = divide(request, available)
        except DoesNotFitError as error:
            # If no other engine ran, the memory granted to other engines would be free.
            promised = max(self._promised(device) for device in devices)
            empty = min(self.available(device, request.free + promised) for device in devices)
            error.details["permanent"] = error.details["required_mb"] > min(empty, request.limit or empty) >> 20
            raise
        if granted.pages < least_pages:
            raise DoesNotFitError(
                f"the free memory holds a KV cache of {granted.pages * request.page_size} tokens, but at least "
                f"{least_pages * request.page_size} are needed; unload another model",
                required_mb=(granted.total + (least_pages - granted.pages) * request.page) >> 20,
                free_mb=available >> 20,
                permanent=False,
            )
        start_time = self._started_at(pid)
        if start_time is not None:
            allocated = previous.allocated if previous is not None and previous.start_time == start_time else 0
            self._holdings[pid] = _Holding(devices, granted.total, start_time, request.held, allocated)
        positions = granted.pages * request.page_size
        if positions < min(request.context, request.pages * request.page_size):
            log.warning(
                "context is shorter, because memory is short pid=%d device=%s context=%d requested=%d; "
                "unload other models for more",
                *(pid, request.device, positions, request.context),
            )
        return granted

    def available(self, device: str, free: int, limit: int = 0) -> int:
        """Return the bytes that a new engine on `device` may be granted.

        Args:
            free: bytes of free memory that the device reports.
            limit: maximum number of bytes that all engines on the device may be granted; 0 for no limit.
        """
        outstanding = sum(self._outstanding(*entry) for entry in self._living() if entry[1].uses(device))
        available = free - self._reserve - outstanding
        return max(min(available, limit - self._promised(device)) if limit else available, 0)

    def granted(self, pid: int) -> int:
        """Return the bytes that the engine process `pid` was granted; 0 if none."""
        holding = self._holdings.get(pid)
        return 0 if holding is None else holding.promised

    def record_allocated(self, pid: int, allocated: int) -> None:
        """Record that the engine process `pid` holds `allocated` bytes of GPU memory."""
        if (holding := self._holdings.get(pid)) is not None:
            holding.allocated = allocated

    def settle(self, pid: int) -> None:
        """Record that the engine process `pid` has loaded its model."""
        holding = self._holdings.get(pid)
        if holding is not None and holding.devices != _CPU:
            holding.settled = True

    def observe(self, free: int) -> None:
        """Compute each engine's missing memory from `free`, the free bytes of host memory.

        The outstanding bytes of an engine are granted to it but not allocated yet. If `free` is less than the
        outstanding bytes of all engines in host memory, the difference is missing. Each engine misses a share of the
        difference, in proportion to its outstanding bytes.
        """
        outstanding_by_pid = {
            pid: self._outstanding(pid, holding) for pid, holding in self._living() if holding.uses("cpu")
        }
        total = sum(outstanding_by_pid.values())
        shortfall = max(total - free, 0)
        for pid, outstanding in outstanding_by_pid.items():
            self._holdings[pid].missing = shortfall * outstanding // max(total, 1)

    def missing(self, pid: int) -> int:
        """Return the missing bytes of the process `pid`, from the last call of `observe`."""
        holding = self._holdings.get(pid)
        return 0 if holding is None else holding.missing

    def _promised(self, device: str) -> int:
        return sum(holding.promised for _, holding in self._living() if holding.uses(device))

    def _living(self) -> list[tuple[int, _Holding]]:
        for pid, holding in list(self._holdings.items()):
            if self._started_at(pid) != holding.start_time:
                del self._holdings[pid]
        return list(self._holdings.items())

    def _outstanding(self, pid: int, holding: _Holding) -> int:
        """Return the granted bytes that the engine process `pid` has not allocated yet."""
        # The server cannot read a process's GPU memory, so the engine reports it while it loads. After the load, the
        # whole grant counts as allocated; if steps allocate more, the memory in reserve covers the difference.
        if holding.devices != _CPU:
            return 0 if holding.settled else max(holding.promised - holding.allocated, 0)
        return max(holding.promised - max((self._private_bytes(pid) or 0) - holding.base, 0), 0)


def _start_time_of(pid: int) -> float | None:
    """Return the start time of the process `pid`, or None if there is no such process.

    On Linux, the time is in clock ticks since boot, so changes of the system's clock have no effect.
    """
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        import psutil  # slow to import, and not needed for a running process on Linux

        try:
            return psutil.Process(pid).create_time()
        except psutil.Error:
            return None


def _same_memory(device: str, other_device: str) -> bool:
    """Return whether two devices use the same memory, as `mps` and `cpu` do."""
    names = {"mps": "cpu", "cuda": "cuda:0"}
    return names.get(device, device) == names.get(other_device, other_device)
