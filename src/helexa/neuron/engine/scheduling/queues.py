"""Holds the running and the waiting sequences, and moves sequences between these two states."""

import time
from bisect import insort
from collections import deque

from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.sequence_memory import Memory


class Queues:
    """All running and waiting sequences of a scheduler. The methods move sequences and free their pages.

    Attributes:
        running, waiting: sequences in these states, sorted by arrival.
        suspects: sequences that may have caused a step to fail. Each suspect is computed in steps without other
            sequences until it samples a token (see `Scheduler.isolate`).
        prompt_tokens: number of prompt tokens of all sequences that have started.
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
        """Remove the sequence `sequence_id` and free its pages. Return False if there is no such sequence."""
        for queue in (self.running, self.waiting):
            for sequence in queue:
                if sequence.id == sequence_id:
                    queue.remove(sequence)
                    self.clear_suspicion(sequence)
                    self.memory.release(sequence)
                    return True
        return False

    def start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Move a sequence to the running sequences. The caller has already removed it from `waiting`.

        Args:
            sequence: the sequence.
            prefix: the cached pages that contain the beginning of the sequence.
        """
        insort(self.running, sequence, key=lambda one: one.arrival)
        self.memory.begin(sequence, prefix)
        if sequence.started is None:
            sequence.started = time.perf_counter()
            sequence.cached = sequence.computed
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += sequence.cached

    def preempt(self, sequence: Sequence) -> None:
        """Free the pages of a running sequence, and move the sequence to the head of `waiting`."""
        self.running.remove(sequence)
        self.memory.release(sequence)
        self.waiting.appendleft(sequence)

    def end(self, sequence: Sequence) -> None:
        """Remove a running sequence and free its pages. Its registered pages stay in the prefix cache."""
        self.running.remove(sequence)
        self.clear_suspicion(sequence)
        self.memory.release(sequence)

    def discard(self, sequence: Sequence) -> list[int]:
        """Remove a running sequence whose pages may contain NaN or infinity. Free and unregister its pages.

        Returns:
            The freed pages that no other sequence uses. The caller must set them to zero before they are reused.
        """
        self.running.remove(sequence)
        self.clear_suspicion(sequence)
        return self.memory.discard(sequence)

    def clear_suspicion(self, sequence: Sequence) -> None:
        """Remove a sequence from `suspects`. Steps then compute it together with other sequences again."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)
