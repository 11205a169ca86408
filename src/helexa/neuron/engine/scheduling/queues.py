"""Holds the running and the waiting sequences, and moves sequences between these two states."""

import time
from collections import OrderedDict, deque
from itertools import takewhile

from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.sequence_memory import Memory
from helexa.neuron.engine.scheduling.waiting_queue import WaitingQueue


class Queues:
    """All running and waiting sequences of a scheduler. The methods move sequences and free their pages.

    Attributes:
        running: the running sequences by request id, sorted by arrival.
        waiting: the waiting sequences.
        suspects: sequences that may have caused a step to fail. Each suspect is computed in steps without other
            sequences until it samples a token (see `Scheduler.isolate`).
        prompt_tokens: number of prompt tokens of all sequences that have started.
        cached_tokens: number of these prompt tokens that were found in the KV cache.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.running: OrderedDict[int, Sequence] = OrderedDict()
        self.waiting = WaitingQueue()
        self.suspects: deque[Sequence] = deque()
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def cancel(self, sequence_id: int) -> bool:
        """Remove the sequence `sequence_id` and free its pages. Return False if there is no such sequence."""
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
        """Move a waiting sequence to the running sequences.

        Args:
            sequence: the sequence.
            prefix: the cached pages that contain the beginning of the sequence.
        """
        self.waiting.remove(sequence)
        newer = list(takewhile(lambda other: other.arrival > sequence.arrival, reversed(self.running.values())))
        self.running[sequence.id] = sequence
        for other in reversed(newer):
            self.running.move_to_end(other.id)
        self.memory.begin(sequence, prefix)
        if sequence.started is None:
            sequence.started = time.perf_counter()
            sequence.cached = sequence.computed
            self.prompt_tokens += len(sequence.tokens)
            self.cached_tokens += sequence.cached

    def preempt(self, sequence: Sequence) -> None:
        """Free the pages of a running sequence, and move the sequence to the head of `waiting`."""
        del self.running[sequence.id]
        self.memory.release(sequence)
        self.waiting.append_left(sequence)

    def end(self, sequence: Sequence) -> None:
        """Remove a running sequence and free its pages. Its registered pages stay in the prefix cache."""
        del self.running[sequence.id]
        self.clear_suspicion(sequence)
        self.memory.release(sequence)

    def discard(self, sequence: Sequence) -> list[int]:
        """Remove a running sequence whose pages may contain NaN or infinity. Free and unregister its pages.

        Returns:
            The freed pages that no other sequence uses. The caller must set them to zero before they are reused.
        """
        del self.running[sequence.id]
        self.clear_suspicion(sequence)
        return self.memory.discard(sequence)

    def clear_suspicion(self, sequence: Sequence) -> None:
        """Remove a sequence from `suspects`. Steps then compute it together with other sequences again."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)
