"""A KV cache that remembers which tokens each slot was computed from, in place of a model."""

from collections.abc import Callable

from helexa.neuron.engine.scheduler import Plan, Scheduler
from helexa.neuron.engine.sequence import Sequence


class SimulatedCache:
    """Runs plans: writes what a model would write, and checks that every sequence reads what it must read."""

    def __init__(self, scheduler: Scheduler, next_token: Callable[[Sequence], int] = lambda sequence: 9) -> None:
        self.scheduler = scheduler
        self.next_token = next_token
        self._slots: dict[tuple[int, int], tuple[str, list[int]]] = {}

    def run(self, plan: Plan) -> list[int]:
        """One step; a token for each entry that samples."""
        size = self.scheduler.pages.page_size
        written: list[int] = []
        for entry in plan:
            sequence = entry.sequence
            for position in range(sequence.computed, sequence.computed + entry.count):
                page = sequence.pages[position // size]
                written.append(page)
                self._slots[page, position % size] = _content(sequence, position)
        for page in set(written):
            assert sum(page in sequence.pages for sequence in self.scheduler.running) == 1, "written, but shared"
        for entry in plan:
            sequence = entry.sequence
            for position in range(sequence.computed + entry.count):
                slot = (sequence.pages[position // size], position % size)
                assert self._slots[slot] == _content(sequence, position)
        return [self.next_token(entry.sequence) for entry in plan if entry.samples]


def _content(sequence: Sequence, position: int) -> tuple[str, list[int]]:
    return sequence.request.salt, sequence.tokens[: position + 1]
