"""Tracks the memory granted to engines, so that two models that load concurrently do not count on the same memory."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.loading.fit import divide
from helexa.neuron.hardware.host_memory import own_bytes

log = logging.getLogger(__name__)


@dataclass
class _Holding:
    """The memory granted to one engine, in bytes.

    Attributes:
        device: the engine's device.
        promised: granted bytes.
        start_time: start time of the process; distinguishes processes with the same id.
        base: bytes that the process held when it requested memory.
        allocated: bytes of GPU memory that the engine reported to hold.
        settled: the engine holds all granted memory.
        missing: granted bytes that the machine could not provide at the last reading.
    """

    device: str
    promised: int
    start_time: float
    base: int
    allocated: int = 0
    settled: bool = False
    missing: int = 0


class MemoryBook:
    """Grants memory to engines. The grants of an engine end with its process.

    A CPU engine allocates granted memory gradually, and the server reads the size of its process. The server cannot
    read the GPU memory of a process, so a GPU engine reports its memory while it loads (see `record_allocated`). After
    `settle`, the engine counts as holding its whole grant. Memory that its steps allocate beyond the grant comes out of
    the reserve.

    Args:
        reserve: bytes of free memory that are never granted.
        private_bytes: returns the private memory of a process in bytes, or None if the process does not exist.
        started_at: returns the start time of a process, or None if the process does not exist.
    """

    def __init__(
        self,
        reserve: int = 0,
        *,
        private_bytes: Callable[[int], int | None] | None = None,
        started_at: Callable[[int], float | None] | None = None,
    ) -> None:
        self._reserve = reserve
        self._private_bytes = private_bytes or own_bytes
        self._started_at = started_at or _start_time_of
        self._holdings: dict[int, _Holding] = {}

    def grant(self, pid: int, request: MemoryRequest) -> MemoryGrant:
        """Grant the engine `pid` memory for its request, and return the grant.

        A new grant replaces an earlier grant to the engine.

        Raises:
            DoesNotFitError: the free memory is too small.
        """
        previous = self._holdings.pop(pid, None)
        others = [
            (other_pid, other) for other_pid, other in self._living() if _same_memory(other.device, request.device)
        ]
        available = (
            request.free - self._reserve - sum(self._outstanding(other_pid, other) for other_pid, other in others)
        )
        if request.limit:
            available = min(available, request.limit - sum(other.promised for _, other in others))
        granted = divide(request, max(available, 0))
        start_time = self._started_at(pid)
        if start_time is not None:
            allocated = previous.allocated if previous is not None and previous.start_time == start_time else 0
            self._holdings[pid] = _Holding(request.device, granted.total, start_time, request.held, allocated)
        positions = granted.pages * request.page_size
        if positions < min(request.context, request.pages * request.page_size):
            log.warning("memory is short: a context of %d tokens instead of %d", positions, request.context)
        return granted

    def record_allocated(self, pid: int, allocated: int) -> None:
        """Record that the engine holds `allocated` bytes of GPU memory."""
        if (holding := self._holdings.get(pid)) is not None:
            holding.allocated = allocated

    def settle(self, pid: int) -> None:
        """Record that the engine is ready. A GPU engine then counts as holding its whole grant."""
        holding = self._holdings.get(pid)
        if holding is not None and holding.device != "cpu":
            holding.settled = True

    def observe(self, free: int) -> None:
        """Record the free memory of the host, in bytes.

        If the free memory is less than all outstanding grants of engines that use the host's memory, the shortage is
        divided among these engines in proportion to their outstanding grants.
        """
        outstanding_by_pid = {
            pid: self._outstanding(pid, holding)
            for pid, holding in self._living()
            if _same_memory(holding.device, "cpu")
        }
        total = sum(outstanding_by_pid.values())
        shortfall = max(total - free, 0)
        for pid, outstanding in outstanding_by_pid.items():
            self._holdings[pid].missing = shortfall * outstanding // max(total, 1)

    def missing(self, pid: int) -> int:
        """Return the bytes granted to an engine that the machine could not provide at the last reading."""
        holding = self._holdings.get(pid)
        return 0 if holding is None else holding.missing

    def _living(self) -> list[tuple[int, _Holding]]:
        for pid, holding in list(self._holdings.items()):
            if self._started_at(pid) != holding.start_time:
                del self._holdings[pid]
        return list(self._holdings.items())

    def _outstanding(self, pid: int, holding: _Holding) -> int:
        """Return the granted bytes that the engine has not taken yet."""
        if holding.device != "cpu":
            return 0 if holding.settled else max(holding.promised - holding.allocated, 0)
        return max(holding.promised - max((self._private_bytes(pid) or 0) - holding.base, 0), 0)


def _start_time_of(pid: int) -> float | None:
    """Return the start time of a process from a clock that is never adjusted; None if there is no such process."""
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        try:
            return psutil.Process(pid).create_time()
        except psutil.Error:
            return None


def _same_memory(device: str, other_device: str) -> bool:
    """Return whether two devices share memory. Apple's GPU (`mps`) uses the host's memory."""
    names = {"mps": "cpu", "cuda": "cuda:0"}
    return names.get(device, device) == names.get(other_device, other_device)
