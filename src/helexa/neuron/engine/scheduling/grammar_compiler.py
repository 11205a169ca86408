"""Compiles grammars in a separate thread before their sequences are queued."""

import queue
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from helexa.core.errors import HelexaError
from helexa.neuron.engine.grammar_matcher import GrammarMatcher, error_line
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.processes import heartbeat

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_CACHED = 8  # compiled grammars in the cache; some take tens of megabytes


@dataclass(frozen=True)
class GrammarFailure:
    """The reason why no grammar matcher was made for a sequence."""

    error: str
    bad_grammar: bool = False  # whether the failure is the fault of the request's grammar and not of the engine


class Grammars:
    """Compiles grammars in a separate thread, between `begin` and `fetch`."""

    def __init__(self, model: Path, width: int) -> None:
        # The model's file or folder. Its vocabulary is read only when the first grammar arrives, because reading takes
        # seconds and as much memory as the weights of a small model.
        self._model = model
        self._width = width  # number of logits per row
        self._open: set[int] = set()  # ids of the sequences that `fetch` has not returned yet
        self._changed = threading.Condition()  # guards `_new`, `_exhausted` and `_closed`
        self._new: dict[int, Sequence] = {}
        self._exhausted: set[str] = set()  # grammars whose matchers have reached a limit
        self._closed = False
        self._results: queue.SimpleQueue[tuple[Sequence, GrammarMatcher | GrammarFailure]] = queue.SimpleQueue()
        # A socket and not an event, because the engine loop waits in `select`.
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        threading.Thread(target=self._work, name="grammars", daemon=True).start()

    def __len__(self) -> int:
        return len(self._open)

    def fileno(self) -> int:
        """Return a file descriptor for `select`, readable when `fetch` has results."""
        return self._ours.fileno()

    def begin(self, sequence: Sequence) -> None:
        """Put a sequence into the queue of sequences whose grammars must be compiled."""
        self._open.add(sequence.id)
        with self._changed:
            self._new[sequence.id] = sequence
            self._changed.notify()

    def cancel(self, sequence_id: int) -> None:
        """Drop the sequence `sequence_id`, if its grammar is queued or being compiled."""
        self._open.discard(sequence_id)
        with self._changed:
            self._new.pop(sequence_id, None)

    def fetch(self) -> list[tuple[Sequence, GrammarFailure | None]]:
        """Return the sequences whose compilation has ended, each with its failure or None.

        None means success. The sequence's `matcher` is then its grammar matcher.
        """
        with suppress(BlockingIOError):
            self._ours.recv(4096)
        ready: list[tuple[Sequence, GrammarFailure | None]] = []
        while not self._results.empty():
            sequence, result = self._results.get()
            # The sequence was canceled while its grammar was compiled.
            if sequence.id not in self._open:
                continue
            self._open.remove(sequence.id)
            if isinstance(result, GrammarFailure):
                ready.append((sequence, result))
            else:
                sequence.matcher = result
                ready.append((sequence, None))
        return ready

    def close(self) -> None:
        """End the thread after its current grammar, and close the file descriptors."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._ours.close()
        self._theirs.close()

    def _work(self) -> None:
        compiled: Callable[[str], LLMatcher] | None = None
        cache: OrderedDict[str, LLMatcher] = OrderedDict()
        while sequence := self._next(cache):
            grammar = sequence.request.grammar
            try:
                compiled = compiled or self._compiler()
                # Reading the vocabulary and compiling take long, and no step runs that would count as progress.
                heartbeat.beat()
                matcher = cache.pop(grammar, None) or compiled(grammar)
                heartbeat.beat()
                cache[grammar] = matcher
                if len(cache) > _MAX_CACHED:
                    cache.popitem(last=False)
                if matcher.is_error():
                    problem = f"the grammar cannot be compiled: {error_line(matcher)}; correct or simplify the grammar"
                    result = GrammarFailure(problem, bad_grammar=True)
                else:
                    result = GrammarMatcher(matcher, self._width, on_limit=partial(self._discard, grammar))
            except HelexaError as error:
                result = GrammarFailure(str(error))
            except BaseException as error:  # a Rust panic in llguidance is not an Exception
                result = GrammarFailure(f"the grammar cannot be compiled: {type(error).__name__}; simplify the grammar")
            self._results.put((sequence, result))
            with suppress(OSError):  # the socket is closed; or it is full, and `select` returns without this byte
                self._theirs.send(b"\0")

    def _compiler(self) -> "Callable[[str], LLMatcher]":
        """Return a function that compiles a grammar and returns a matcher for it."""
        # This method imports llguidance, because the import is slow and most engines never receive a grammar.
        from llguidance import LLMatcher, LLParserLimits

        from helexa.neuron.engine.grammar_matcher import read_vocabulary
        from helexa.neuron.grammar.grammar_check_and_rejection import PARSER_LIMITS

        tokenizer = read_vocabulary(self._model, self._width)
        return partial(LLMatcher, tokenizer, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))

    def _discard(self, grammar: str) -> None:
        """Drop the compiled `grammar` from the cache, so that its next use compiles it."""
        with self._changed:
            self._exhausted.add(grammar)

    def _next(self, cache: MutableMapping[str, "LLMatcher"]) -> Sequence | None:
        """Wait for a sequence whose grammar is to be compiled; return None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._closed)
            if self._closed:
                return None
            while self._exhausted:
                cache.pop(self._exhausted.pop(), None)
            # A sequence whose grammar is in the cache does not wait until other grammars are compiled.
            cached = (sequence for sequence in self._new.values() if sequence.request.grammar in cache)
            sequence = next(cached, None) or next(iter(self._new.values()))
            return self._new.pop(sequence.id)
