"""Grammars: compiled for the sequences that bring one, in a thread of its own, before they wait for their turn."""

import queue
import socket
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from helexa.core.errors import HelexaError
from helexa.neuron.engine.guide import Guide, said
from helexa.neuron.engine.sequence import Sequence
from helexa.neuron.engine.vocabulary import read_vocabulary
from helexa.neuron.grammar.limits import PARSER_LIMITS

_KEPT = 8  # some are tens of megabytes
_LIMITS = LLParserLimits(**PARSER_LIMITS)


class Grammars:
    """Compiles. Whoever serves the engine's socket gives sequences in and fetches them when they are ready.

    Args:
        model: the model's file or folder; its vocabulary is read when the first grammar comes.
        width: how many logits a row has.
    """

    def __init__(self, model: Path, width: int) -> None:
        self._model = model
        self._width = width
        self._open: dict[int, Sequence] = {}
        self._asked: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, LLMatcher | str]] = queue.SimpleQueue()
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._open)

    def fileno(self) -> int:
        """Readable when there is something to fetch."""
        return self._ours.fileno()

    def begin(self, sequence: Sequence) -> None:
        """Compile the grammar of a sequence."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
        self._open[sequence.id] = sequence
        self._asked.put((sequence.id, sequence.request.grammar))

    def cancel(self, sequence_id: int) -> None:
        """Forget a sequence if it is here."""
        self._open.pop(sequence_id, None)

    def fetch(self) -> list[tuple[Sequence, str]]:
        """Sequences that have got their guides, or could not, with what is wrong then; never waits."""
        with suppress(BlockingIOError):
            self._ours.recv(4096)
        ready: list[tuple[Sequence, str]] = []
        while not self._done.empty():
            number, result = self._done.get()
            sequence = self._open.pop(number, None)
            if sequence is None:
                continue
            if isinstance(result, str):
                ready.append((sequence, result))
            else:
                sequence.guide = Guide(result)
                ready.append((sequence, ""))
        return ready

    def close(self) -> None:
        """End the thread when it has done what it is doing."""
        self._asked.put(None)
        self._ours.close()
        self._theirs.close()

    def _work(self) -> None:
        tokenizer: LLTokenizer | None = None
        kept: OrderedDict[str, LLMatcher] = OrderedDict()
        while asked := self._asked.get():
            number, grammar = asked
            if number not in self._open:  # cancelled
                continue
            try:
                tokenizer = tokenizer or read_vocabulary(self._model, self._width)
                matcher = kept.pop(grammar, None) or LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
                kept[grammar] = matcher
                if len(kept) > _KEPT:
                    kept.popitem(last=False)
                error = f"the grammar cannot be compiled: {said(matcher)}" if matcher.is_error() else ""
                result = error or matcher.deep_copy()
            except HelexaError as problem:
                result = str(problem)
            except Exception as problem:
                result = f"the grammar cannot be compiled: {type(problem).__name__}"
            self._done.put((number, result))
            with suppress(OSError):  # it is closed, or full, and whoever is to wake has plenty to wake of
                self._theirs.send(b"\0")
