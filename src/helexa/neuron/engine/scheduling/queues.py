"""The waiting queue and the running sequences of an engine."""

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from itertools import takewhile

from helexa.neuron.engine.scheduling.cache_miss import RecentPrompts
from helexa.neuron.engine.scheduling.page_allocation_and_prefix_hits import Memory
from helexa.neuron.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """Waiting sequences in the order in which they should start."""

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
        # Places grow in both directions, so that no other sequence is renumbered.
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


class Queues:
    """All running and waiting sequences. The methods move them and free their pages."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        # the running sequences by request id, sorted by arrival
        self.running: OrderedDict[int, Sequence] = OrderedDict()
        self.waiting = WaitingQueue()  # the waiting sequences
        # Sequences that may have caused a step to fail. Each suspect is computed in steps without other sequences until
        # it samples a token (see `Scheduler.isolate`).
        self.suspects: deque[Sequence] = deque()
        self.recent = RecentPrompts(memory)  # the latest long prompts, which explain why a prompt was not cached
        self.prompt_tokens = 0  # number of prompt tokens of all sequences that have started
        self.cached_prompts = 0  # number of started prompts whose beginning was found in the KV cache
        self.cached_tokens = 0  # number of the tokens in `prompt_tokens` that were found in the KV cache

    def cancel(self, sequence_id: int) -> bool:
        """Remove a sequence and free its pages; return False if there is no such sequence."""
        sequence = self.running.pop(sequence_id, None)
        if sequence is None:
            sequence = self.waiting.get(sequence_id)
            if sequence is None:
                return False
            self.waiting.remove(sequence)
        self.clear_suspicion(sequence)
        self.memory.release(sequence)
        return True

    def start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Move a waiting sequence to `running`; `prefix`: see `Memory.computed_before`."""
        self.waiting.remove(sequence)
        # A preempted sequence may be older than running ones. Preemption needs `running` in the order of arrival.
        newer = list(takewhile(lambda other: other.arrival > sequence.arrival, reversed(self.running.values())))
        self.running[sequence.id] = sequence
        for other in reversed(newer):
            self.running.move_to_end(other.id)
        self.memory.begin(sequence, prefix)
        # Later starts, after preemptions, do not count, because the sequence then finds its own pages in the cache.
        if sequence.started is None:
            sequence.started = time.perf_counter()
            sequence.cached = sequence.computed
            sequence.miss = self.recent.explain(sequence)
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += sequence.cached
            self.cached_prompts += sequence.cached > 0

    def preempt(self, sequence: Sequence) -> None:
        """Free the pages of a running sequence, and move it to the head of `waiting`."""
        del self.running[sequence.id]
        self.memory.release(sequence)
        self.waiting.append_left(sequence)

    def end(self, sequence: Sequence) -> None:
        """Remove a running sequence and free its pages. The prefix cache keeps full pages."""
        del self.running[sequence.id]
        self.clear_suspicion(sequence)
        self.memory.release(sequence)

    def discard(self, sequence: Sequence) -> list[int]:
        """Remove a running sequence whose pages may contain NaN or infinity.

        Returns:
            The freed pages that no other sequence uses. The caller must set them to zero before they are reused.
        """
        del self.running[sequence.id]
        self.clear_suspicion(sequence)
        return self.memory.discard(sequence)

    def clear_suspicion(self, sequence: Sequence) -> None:
        """Remove a sequence from `suspects`, if it is a suspect."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)
