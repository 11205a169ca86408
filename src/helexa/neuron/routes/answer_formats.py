"""Projectors convert the output events of a run to one API format."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from helexa.core.sse import DONE, frame
from helexa.core.wire.usage_and_encoded_lists import Usage, usage
from helexa.neuron.output_events import (
    ChoiceEvent,
    Failed,
    Finished,
    InferenceEvent,
    OutputEvent,
    PromptCounted,
    PromptScores,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
)


class Projector(Protocol):
    """Converts the output events of a run to the answer in one API format.

    For a stream, the caller passes every event to `frames`. Otherwise it passes every event to `take` and then calls
    `body`.
    """

    def frames(self, event: InferenceEvent) -> bytes:
        """Return the server-sent events for `event` as bytes, which may be empty."""
        ...

    def take(self, event: InferenceEvent) -> None:
        """Record the content of `event` that the response body must contain."""
        ...

    def body(self) -> bytes:
        """Return the JSON body, after all events were passed to `take`."""
        ...


class OpenAIProjector(ABC):
    """Base class of the projectors to OpenAI's formats of chat and text completions."""

    id_prefix: str

    def __init__(
        self,
        model: str,
        *,
        choices: int = 1,
        include_usage: bool = False,
        null_usage: bool = False,
    ) -> None:
        self.model = model
        # Number of answers. If there are several, the events of each answer are wrapped in `ChoiceEvent`.
        self.choices = choices
        # whether the last chunk of a stream contains the token counts (`usage`) and no choices
        self.include_usage = include_usage
        # whether all other chunks have `"usage": null`, as in OpenAI's streams if the client requests usage
        self.null_usage = null_usage
        self.id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self._frames: dict[tuple[int, type], tuple[bytes, bytes]] = {}
        self._events: list[list[OutputEvent]] = [[] for _ in range(choices)]
        # the `Finished` event of each answer; the last element is the event with the totals of all answers
        self._ends: list[Finished | None] = [None] * (choices + 1)

    @abstractmethod
    def chunk(self, choice: int, event: Started | OutputEvent | Finished) -> Mapping[str, Any] | None:
        """Return the stream chunk for an event of answer `choice`; None for no chunk."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Mapping[str, Any]:
        """Return the last chunk, with the token counts `usage` and no choices."""

    @abstractmethod
    def keep_logprobs(self, choice: int, tokens: Sequence[TokenLogprob]) -> None:
        """Record log-probabilities of the next tokens of answer `choice` or its prompt."""

    @abstractmethod
    def choice(self, index: int, events: Sequence[OutputEvent], end: Finished) -> Mapping[str, Any]:
        """Return the complete answer `index`, an element of `choices` in the body.

        Args:
            events: all output events of the answer, without their log-probabilities.
        """

    @abstractmethod
    def complete_body(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> Mapping[str, Any]:
        """Return the body with the answers `choices` and the token counts `usage`."""

    def frames(self, event: InferenceEvent) -> bytes:
        """Return the server-sent events for `event` as bytes, which may be empty."""
        match event:
            case Started():
                return b"".join([self._frame(choice, event) for choice in range(self.choices)])
            case ChoiceEvent(index, answer_event):
                return self._frame(index, answer_event)
            case Finished():
                last = self._frame(0, event) if self.choices == 1 else b""
                usage = _event(self.usage_chunk(_usage(event))) if self.include_usage else b""
                return last + usage + DONE
            case Failed(error):
                return _event(error.envelope()) + DONE
            case PromptCounted(prompt, cached):
                return _event({"choices": [], "helexa_prompt": {"prompt_tokens": prompt, "cached_tokens": cached}})
            case _:
                return self._frame(0, event)

    def take(self, event: InferenceEvent) -> None:
        """Record the content of `event` that the response body must contain."""
        match event:
            case ChoiceEvent(index, answer_event):
                if isinstance(answer_event, Finished):
                    self._ends[index] = answer_event
                else:
                    self._take(index, answer_event)
            case Finished():
                self._ends[-1] = event
            case Started() | PromptCounted() | Failed():
                pass
            case _:
                self._take(0, event)

    def body(self) -> bytes:
        """Return the JSON body, after all events were passed to `take`."""
        *ends, last = self._ends
        assert last is not None
        choices: list[Mapping[str, Any]] = []
        for index, (answer_events, end) in enumerate(zip(self._events, ends, strict=True)):
            choices.append(_with_stop_string(self.choice(index, answer_events, end or last), end or last))
        return orjson.dumps(self.complete_body(choices, _usage(last)))

    def _take(self, choice: int, event: OutputEvent) -> None:
        if isinstance(event, PromptScores):
            self.keep_logprobs(choice, event.tokens)
            return
        if isinstance(event, TextDelta) and event.logprobs:
            self.keep_logprobs(choice, event.logprobs)
            event = TextDelta(event.text)
        self._events[choice].append(event)

    def _frame(self, choice: int, event: Started | OutputEvent | Finished) -> bytes:
        if isinstance(event, ReasoningDelta) or (isinstance(event, TextDelta) and not event.logprobs):
            # All chunks of one kind differ only in their text, so the JSON around the text is encoded once and reused.
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
        return _event({**chunk, "usage": None} if self.null_usage else chunk)


def _event(value: Mapping[str, Any]) -> bytes:
    return frame(orjson.dumps(value))


def _with_stop_string(choice: Any, end: Finished) -> Any:
    """Add the stop string to `choice` as `stop_reason`, like vLLM."""
    if end.stop_string is not None:
        choice["stop_reason"] = end.stop_string
    return choice


def _usage(end: Finished) -> Usage:
    return usage(
        end.prompt_tokens,
        end.completion_tokens,
        cached_tokens=end.cached_tokens,
        reasoning_tokens=end.reasoning_tokens,
        image_tokens=end.image_tokens,
        miss=end.miss,
        prefill_ms=end.prefill_ms,
        decode_ms=end.decode_ms,
    )
