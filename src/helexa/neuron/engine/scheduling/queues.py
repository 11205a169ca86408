"""Queues: the running and the waiting sequences, and the memory that they hold."""

import time
from bisect import insort
from collections import deque

from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.sequence_memory import Memory


class Queues:
    """The sequences of a scheduler.

    Attributes:
        running, waiting: sequences sorted by arrival.
        suspects: sequences of a failed step; each gets separate steps until it samples a token.
        prompt_tokens: number of prompt tokens of all sequences that were started.
        cached_tokens: number of these tokens that were found in the KV cache.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.suspects: deque[Sequence] = deque()
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def cancel(self, sequence_id: int) -> bool:
        """Remove a sequence and free its pages; return False if it is not queued."""
        for queue in (self.running, self.waiting):
            for sequence in queue:
                if sequence.id == sequence_id:
                    queue.remove(sequence)
                    self.clear_suspicion(sequence)
                    self.memory.release(sequence)
                    return True
        return False

    def start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Move a sequence that left `waiting` to `running`; `prefix` lists the cached pages that hold its beginning."""
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
        """Remove a running sequence and free its pages; later prompts can reuse registered pages."""
        self.running.remove(sequence)
        self.clear_suspicion(sequence)
        self.memory.release(sequence)

    def discard(self, sequence: Sequence) -> list[int]:
        """Remove a running sequence and unregister its pages.

        Returns:
            The pages that no other sequence holds; the caller must clear them.
        """
        self.running.remove(sequence)
        self.clear_suspicion(sequence)
        return self.memory.discard(sequence)

    def clear_suspicion(self, sequence: Sequence) -> None:
        """Return a sequence from `suspects` to steps with other sequences."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)
