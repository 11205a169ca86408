"""The queue of waiting sequences. The cost of its methods does not depend on the number of sequences."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from helexa.neuron.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Waiting sequences in the order in which they should start.

    Attributes:
        counts: number of waiting sequences by principal. Principals without waiting sequences have no entry.
    """

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()  # by request id
        self._by_principal: dict[str, OrderedDict[int, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def first(self) -> Sequence | None:
        """The sequence at the head of the queue; None if the queue is empty."""
        return next(iter(self), None)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of waiting sequences by principal."""
        return {principal: len(sequences) for principal, sequences in self._by_principal.items()}

    def firsts(self) -> list[Sequence]:
        """Return the first waiting sequence of each principal, in any order."""
        return [next(iter(sequences.values())) for sequences in self._by_principal.values()]

    def get(self, sequence_id: int) -> Sequence | None:
        """Return the waiting sequence with the id `sequence_id`; None if there is none."""
        return self._sequences.get(sequence_id)

    def append(self, sequence: Sequence) -> None:
        """Add a sequence to the end of the queue."""
        last = next(reversed(self._sequences.values()), None)
        sequence.place = 0 if last is None else last.place + 1
        for sequences in self._queues_of(sequence):
            sequences[sequence.id] = sequence

    def append_left(self, sequence: Sequence) -> None:
        """Add a sequence to the head of the queue."""
        first = self.first
        sequence.place = 0 if first is None else first.place - 1
        for sequences in self._queues_of(sequence):
            sequences[sequence.id] = sequence
            sequences.move_to_end(sequence.id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence."""
        for sequences in self._queues_of(sequence):
            del sequences[sequence.id]
        if not self._by_principal[sequence.principal]:
            del self._by_principal[sequence.principal]

    def clear(self) -> None:
        """Remove all sequences."""
        self._sequences.clear()
        self._by_principal.clear()

    def _queues_of(self, sequence: Sequence) -> tuple[OrderedDict[int, Sequence], OrderedDict[int, Sequence]]:
        return self._sequences, self._by_principal.setdefault(sequence.principal, OrderedDict())
