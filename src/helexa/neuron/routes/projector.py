"""Projectors: a run's events rendered in a dialect, by one class for streamed and whole replies alike."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from helexa.core.sse import DONE, frame
from helexa.core.wire.usage import Usage, usage
from helexa.neuron.events import (
    Failed,
    Finished,
    InferenceEvent,
    OfChoice,
    OutputEvent,
    ReasoningDelta,
    Started,
    TextDelta,
)


class Projector(Protocol):
    """Renders events in one dialect. Pure: it does no I/O, and the same events give the same bytes."""

    def frames(self, event: InferenceEvent) -> bytes:
        """What a stream says of `event`: whole server-sent events, possibly none."""
        ...

    def body(self, events: Sequence[InferenceEvent]) -> bytes:
        """The whole reply as JSON, of the events of a run that finished."""
        ...


class OpenAIProjector(ABC):
    """What OpenAI's chat and text completions have in common.

    Args:
        choices: how many answers there are; with more than one, their events come as `OfChoice`.
    """

    id_prefix: str

    def __init__(self, model: str, *, choices: int = 1, id: str | None = None, created: int | None = None) -> None:
        self.model = model
        self.choices = choices
        self.id = id or f"{self.id_prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time()) if created is None else created
        self._frames: dict[tuple[int, type], tuple[bytes, bytes]] = {}

    @abstractmethod
    def chunk(self, choice: int, event: Started | OutputEvent | Finished) -> Mapping[str, Any] | None:
        """The chunk that says so of an answer, if there is one."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]:
        """The chunk that carries the usage and no choices."""

    @abstractmethod
    def choice(self, index: int, events: Sequence[OutputEvent], end: Finished) -> Mapping[str, Any]:
        """A whole answer, as the reply that is not streamed has it."""

    @abstractmethod
    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> Mapping[str, Any]:
        """The reply that is not streamed."""

    def frames(self, event: InferenceEvent) -> bytes:
        """What a stream says of `event`."""
        match event:
            case Started():
                return b"".join([self._frame(choice, event) for choice in range(self.choices)])
            case OfChoice(index, said):
                return self._frame(index, said)
            case Finished():
                last = self._frame(0, event) if self.choices == 1 else b""
                return last + _event(self.usage_chunk(_usage(event))) + DONE
            case Failed(error):
                return _event(error.envelope()) + DONE
            case _:
                return self._frame(0, event)

    def body(self, events: Sequence[InferenceEvent]) -> bytes:
        """The whole reply."""
        *_, end = events
        assert isinstance(end, Finished)
        said: list[list[OutputEvent]] = [[] for _ in range(self.choices)]
        ends = [end] * self.choices
        for event in events:
            match event:
                case OfChoice(index, piece):
                    if isinstance(piece, Finished):
                        ends[index] = piece
                    else:
                        said[index].append(piece)
                case Started() | Finished() | Failed():
                    pass
                case _:
                    said[0].append(event)
        choices = [
            _with_stop_string(self.choice(index, pieces, ends[index]), ends[index]) for index, pieces in enumerate(said)
        ]
        return orjson.dumps(self.whole(choices, _usage(end)))

    def _frame(self, choice: int, event: Started | OutputEvent | Finished) -> bytes:
        if isinstance(event, ReasoningDelta) or (isinstance(event, TextDelta) and not event.logprobs):
            # Such a chunk differs from the next one in its text only, so the rest is encoded once.
            kind = (choice, type(event))
            if kind not in self._frames:
                head, _, tail = self._encoded(choice, type(event)("")).rpartition(b'""')
                self._frames[kind] = head, tail
            head, tail = self._frames[kind]
            return head + orjson.dumps(event.text) + tail
        return self._encoded(choice, event)

    def _encoded(self, choice: int, event: Started | OutputEvent | Finished) -> bytes:
        chunk = self.chunk(choice, event)
        if chunk is None:
            return b""
        if isinstance(event, Finished):
            _with_stop_string(chunk["choices"][0], event)
        return _event(chunk)


def _event(value: Mapping[str, Any]) -> bytes:
    return frame(orjson.dumps(value))


def _with_stop_string(choice: Any, end: Finished) -> Any:
    """Name the stop string that ended the answer, as vLLM does."""
    if end.stop_string is not None:
        choice["stop_reason"] = end.stop_string
    return choice


def _usage(end: Finished) -> Usage:
    return usage(
        end.prompt_tokens,
        end.completion_tokens,
        cached_tokens=end.cached_tokens,
        reasoning_tokens=end.reasoning_tokens,
        prefill_ms=end.prefill_ms,
        decode_ms=end.decode_ms,
    )
