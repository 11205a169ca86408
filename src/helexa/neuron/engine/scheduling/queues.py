"""Holds the running and the waiting sequences, and moves sequences between the two states."""

import time
from bisect import insort
from collections import deque

from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.sequence_memory import Memory


class Queues:
    """All sequences of a scheduler, running or waiting; moves them and frees their pages.

    Attributes:
        running, waiting: sequences sorted by arrival.
        suspects: sequences that may have caused a step to fail. Each suspect is computed in steps without other
            sequences until it samples a token (see `Scheduler.isolate`).
        prompt_tokens: number of prompt tokens of all sequences that were started.
        cached_tokens: number of these prompt tokens that were found in the KV cache.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.suspects: deque[Sequence] = deque()
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def cancel(self, sequence_id: int) -> bool:
        """Remove a running or waiting sequence and free its pages; return False if there is no such sequence."""
        for queue in (self.running, self.waiting):
            for sequence in queue:
                if sequence.id == sequence_id:
                    queue.remove(sequence)
                    self.clear_suspicion(sequence)
                    self.memory.release(sequence)
                    return True
        return False

    def start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Add a sequence to `running`; the caller has removed it from `waiting`.

        Args:
            prefix: the cached pages that hold the sequence's beginning.
        """
        insort(self.running, sequence, key=lambda one: one.arrival)
        self.memory.begin(sequence, prefix)
        if sequence.started is None:
            sequence.started = time.perf_counter()
            sequence.cached = sequence.computed
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += sequence.cached

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence to the head of `waiting` and free its pages."""
        self.running.remove(sequence)
        self.memory.release(sequence)
        self.waiting.appendleft(sequence)

    def end(self, sequence: Sequence) -> None:
        """Remove a running sequence and free its pages. Later prompts can reuse pages that are registered."""
        self.running.remove(sequence)
        self.clear_suspicion(sequence)
        self.memory.release(sequence)

    def discard(self, sequence: Sequence) -> list[int]:
        """Remove a running sequence, and free and unregister its pages, because they may contain NaN or inf.

        Returns:
            The freed pages that no other sequence holds; the caller must clear them.
        """
        self.running.remove(sequence)
        self.clear_suspicion(sequence)
        return self.memory.discard(sequence)

    def clear_suspicion(self, sequence: Sequence) -> None:
        """Remove a sequence from `suspects`, so that it is computed together with other sequences again."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)
