"""Tracks the memory granted to engines, so that two models that load concurrently do not get the same memory."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.loading.fit import divide
from helexa.neuron.hardware.host_memory import engine_bytes

log = logging.getLogger(__name__)

_CPU = ("cpu",)


@dataclass
class _Holding:
    """The memory granted to one engine, in bytes.

    Attributes:
        devices: the engine's devices, each of which holds the memory.
        promised: granted bytes.
        start_time: start time of the engine process. A later process with the same process id has another start time.
        base: bytes that the engine process used when it requested memory.
        allocated: bytes of GPU memory that the engine holds, as it has reported.
        settled: whether a GPU engine has finished loading; all granted memory then counts as allocated.
        missing: granted bytes that the engine had not allocated and that were not free at the last call of
            `MemoryGrants.observe`.
    """

    devices: tuple[str, ...]
    promised: int
    start_time: float
    base: int
    allocated: int = 0
    settled: bool = False
    missing: int = 0

    def uses(self, device: str) -> bool:
        """Return whether the engine holds memory of `device`."""
        return any(_same_memory(own, device) for own in self.devices)


class MemoryGrants:
    """Grants memory to engines. A grant ends when the engine's process ends.

    An engine with ranks on several devices takes the granted memory on each of the devices.

    Engines allocate their granted memory gradually. Until then, the machine reports this memory as free. This class
    therefore subtracts the granted bytes that are not allocated yet from the free memory before the next grant. How it
    finds the allocated bytes depends on the device:

    * CPU: this class reads the size of the engine's process.
    * GPU: the engine reports its GPU memory during loading (see `record_allocated`), because the server cannot read it.
      When loading has ended (see `settle`), the whole grant counts as allocated. If steps allocate more than the grant,
      the memory in reserve covers the difference.

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

    def grant(self, pid: int, request: MemoryRequest) -> MemoryGrant:
        """Decide how much of the free memory the engine process `pid` may use, and return the grant.

        The new grant replaces an earlier grant to the same engine.

        Raises:
            DoesNotFitError: the free memory is too small.
        """
        previous = self._holdings.pop(pid, None)
        devices = tuple(request.devices) or (request.device,)
        others = [[entry for entry in self._living() if entry[1].uses(device)] for device in devices]
        outstanding = max(sum(self._outstanding(*entry) for entry in entries) for entries in others)
        available = request.free - self._reserve - outstanding
        if request.limit:
            promised = max(sum(other.promised for _, other in entries) for entries in others)
            available = min(available, request.limit - promised)
        granted = divide(request, max(available, 0))
        start_time = self._started_at(pid)
        if start_time is not None:
            allocated = previous.allocated if previous is not None and previous.start_time == start_time else 0
            self._holdings[pid] = _Holding(devices, granted.total, start_time, request.held, allocated)
        positions = granted.pages * request.page_size
        if positions < min(request.context, request.pages * request.page_size):
            log.warning("memory is short: a context of %d tokens instead of %d", positions, request.context)
        return granted

    def record_allocated(self, pid: int, allocated: int) -> None:
        """Record that the engine process `pid` holds `allocated` bytes of GPU memory."""
        if (holding := self._holdings.get(pid)) is not None:
            holding.allocated = allocated

    def settle(self, pid: int) -> None:
        """Record that the engine process `pid` has loaded its model.

        The whole grant of a GPU engine then counts as allocated.
        """
        holding = self._holdings.get(pid)
        if holding is not None and holding.devices != _CPU:
            holding.settled = True

    def observe(self, free: int) -> None:
        """Compute the missing memory of each engine, if the host has `free` bytes of free memory.

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
        """Return the bytes that the engine process `pid` missed at the last call of `observe`."""
        holding = self._holdings.get(pid)
        return 0 if holding is None else holding.missing

    def _living(self) -> list[tuple[int, _Holding]]:
        for pid, holding in list(self._holdings.items()):
            if self._started_at(pid) != holding.start_time:
                del self._holdings[pid]
        return list(self._holdings.items())

    def _outstanding(self, pid: int, holding: _Holding) -> int:
        """Return the granted bytes that the engine process `pid` has not allocated yet."""
        if holding.devices != _CPU:
            return 0 if holding.settled else max(holding.promised - holding.allocated, 0)
        return max(holding.promised - max((self._private_bytes(pid) or 0) - holding.base, 0), 0)


def _start_time_of(pid: int) -> float | None:
    """Return the start time of the process `pid`, or None if there is no such process.

    Linux counts the time since boot, so changes of the system's clock have no effect.
    """
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        try:
            return psutil.Process(pid).create_time()
        except psutil.Error:
            return None


def _same_memory(device: str, other_device: str) -> bool:
    """Return whether two devices use the same memory. Apple's GPU (`mps`) uses the host's memory, as `cpu` does."""
    names = {"mps": "cpu", "cuda": "cuda:0"}
    return names.get(device, device) == names.get(other_device, other_device)
