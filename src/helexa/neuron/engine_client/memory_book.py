"""Who was promised how much memory: so that two models that load side by side do not both count on the same."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from helexa.neuron.engine.ipc.messages import Grant, Needs
from helexa.neuron.engine.loading.fit import divide
from helexa.neuron.hardware.host_memory import own_bytes

log = logging.getLogger(__name__)


@dataclass
class _Holding:
    """What one engine was promised.

    Attributes:
        begun: when its process began, since numbers of processes come again.
        base: bytes that it held before.
        taken: bytes of an accelerator's memory that it has said to hold.
        settled: nothing of the promise is outstanding any more.
        missing: of the promise, bytes that the machine could not give at the last reading.
    """

    device: str
    promised: int
    begun: float
    base: int
    taken: int = 0
    settled: bool = False
    missing: int = 0


class MemoryBook:
    """Promises to engines. Those of an engine end with its process.

    An engine on a CPU takes what it was promised little by little. On an accelerator nobody sees how much it has taken:
    while it loads, it says so itself (`took`). When it is ready it counts as having taken all of it, and `settle` says
    so; what its steps take later is the reserve's to cover.

    Args:
        reserve: bytes of free memory that no model is promised.
        held: bytes that a process holds of memory that is its alone; None if there is no such process (any more).
        begun: when a process began; None if there is none.
    """

    def __init__(
        self,
        reserve: int = 0,
        *,
        held: Callable[[int], int | None] | None = None,
        begun: Callable[[int], float | None] | None = None,
    ) -> None:
        self._reserve = reserve
        self._held = held or own_bytes
        self._begun = begun or _begun
        self._holdings: dict[int, _Holding] = {}

    def grant(self, pid: int, needs: Needs) -> Grant:
        """Promise the engine `pid` what it needs, as far as there is room, in place of an earlier promise to it.

        Raises:
            DoesNotFitError: there is not enough.
        """
        before = self._holdings.pop(pid, None)
        others = [(each, other) for each, other in self._living() if _same_memory(other.device, needs.device)]
        room = needs.free - self._reserve - sum(self._outstanding(each, other) for each, other in others)
        if needs.limit:
            room = min(room, needs.limit - sum(other.promised for _, other in others))
        granted = divide(needs, max(room, 0))
        begun = self._begun(pid)
        if begun is not None:
            taken = before.taken if before is not None and before.begun == begun else 0
            self._holdings[pid] = _Holding(needs.device, granted.total, begun, needs.held, taken)
        positions = granted.pages * needs.page_size
        if positions < min(needs.context, needs.pages * needs.page_size):
            log.warning("memory is short: a context of %d tokens instead of %d", positions, needs.context)
        return granted

    def took(self, pid: int, taken: int) -> None:
        """The engine says that it holds so many bytes of an accelerator's memory."""
        if (holding := self._holdings.get(pid)) is not None:
            holding.taken = taken

    def settle(self, pid: int) -> None:
        """The engine is ready: on an accelerator, it holds all that it was promised."""
        holding = self._holdings.get(pid)
        if holding is not None and holding.device != "cpu":
            holding.settled = True

    def observe(self, free: int) -> None:
        """Take note of how much memory of the host is free now: engines that count on more share what is missing."""
        owed = {
            pid: self._outstanding(pid, holding)
            for pid, holding in self._living()
            if _same_memory(holding.device, "cpu")
        }
        total = sum(owed.values())
        short = max(total - free, 0)
        for pid, outstanding in owed.items():
            self._holdings[pid].missing = short * outstanding // max(total, 1)

    def missing(self, pid: int) -> int:
        """Bytes promised to an engine that the machine could not give when it was last looked at."""
        holding = self._holdings.get(pid)
        return 0 if holding is None else holding.missing

    def _living(self) -> list[tuple[int, _Holding]]:
        for pid, holding in list(self._holdings.items()):
            if self._begun(pid) != holding.begun:
                del self._holdings[pid]
        return list(self._holdings.items())

    def _outstanding(self, pid: int, holding: _Holding) -> int:
        """Bytes that were promised and are not taken yet."""
        if holding.device != "cpu":
            return 0 if holding.settled else max(holding.promised - holding.taken, 0)
        return max(holding.promised - max((self._held(pid) or 0) - holding.base, 0), 0)


def _begun(pid: int) -> float | None:
    """When a process began, on a clock that nobody sets."""
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        try:
            return psutil.Process(pid).create_time()
        except psutil.Error:
            return None


def _same_memory(device: str, other: str) -> bool:
    """Whether two devices take from the same: Apple's accelerator has no memory of its own."""
    names = {"mps": "cpu", "cuda": "cuda:0"}
    return names.get(device, device) == names.get(other, other)
