"""Projectors: a run's events rendered in a dialect, by one class for streamed and whole replies alike."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from helexa.core.sse import DONE, frame
from helexa.core.wire.usage import Usage, usage
from helexa.neuron.events import Failed, Finished, InferenceEvent, Started, TextDelta


class Projector(Protocol):
    """Renders events in one dialect. Pure: it does no I/O, and the same events give the same bytes."""

    def frames(self, event: InferenceEvent) -> bytes:
        """What a stream says of `event`: whole server-sent events, possibly none."""
        ...

    def body(self, events: Sequence[InferenceEvent]) -> bytes:
        """The whole reply as JSON, of the events of a run that finished."""
        ...


class OpenAIProjector(ABC):
    """What OpenAI's chat and text completions have in common."""

    id_prefix: str

    def __init__(self, model: str, *, id: str | None = None, created: int | None = None) -> None:
        self.model = model
        self.id = id or f"{self.id_prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time()) if created is None else created
        # A delta differs from the next one in its text only, so the rest is encoded once.
        self._delta_head, _, self._delta_tail = _event(self.chunk("", None)).rpartition(b'""')

    @abstractmethod
    def chunk(self, text: str | None, finish_reason: str | None) -> Mapping[str, Any]:
        """A chunk with a piece of text, or with the finish reason."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]:
        """The chunk that carries the usage and no choices."""

    @abstractmethod
    def whole(self, text: str, finish_reason: str, usage: Usage) -> Mapping[str, Any]:
        """The reply that is not streamed."""

    def opening(self) -> bytes:
        """What a stream begins with."""
        return b""

    def frames(self, event: InferenceEvent) -> bytes:
        """What a stream says of `event`."""
        match event:
            case TextDelta(text):
                return self._delta_head + orjson.dumps(text) + self._delta_tail
            case Started():
                return self.opening()
            case Finished():
                last = _with_stop_string(self.chunk(None, event.reason), event)
                return _event(last) + _event(self.usage_chunk(_usage(event))) + DONE
            case Failed(error):
                return _event(error.envelope()) + DONE

    def body(self, events: Sequence[InferenceEvent]) -> bytes:
        """The whole reply."""
        end = events[-1]
        assert isinstance(end, Finished)
        text = "".join([event.text for event in events if isinstance(event, TextDelta)])
        return orjson.dumps(_with_stop_string(self.whole(text, end.reason, _usage(end)), end))


def _event(value: Mapping[str, Any]) -> bytes:
    return frame(orjson.dumps(value))


def _with_stop_string(reply: Mapping[str, Any], end: Finished) -> Mapping[str, Any]:
    """Name the stop string that ended the answer, as vLLM does."""
    if end.stop_string is not None:
        reply["choices"][0]["stop_reason"] = end.stop_string
    return reply


def _usage(end: Finished) -> Usage:
    return usage(
        end.prompt_tokens,
        end.completion_tokens,
        cached_tokens=end.cached_tokens,
        prefill_ms=end.prefill_ms,
        decode_ms=end.decode_ms,
    )
