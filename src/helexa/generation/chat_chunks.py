"""Reads the chunks of a streamed chat completion as events of a response.

Fields of a wrong type are ignored.
"""

from collections.abc import Iterator
from typing import Any, cast

from helexa.generation.completion import Delta, FinishReason, TokenLogprob, Usage
from helexa.generation.errors import EngineError
from helexa.generation.target import End, Event
from helexa.generation.tools import ToolCallDelta

_REASONS = ("stop", "length", "tool_calls")


class ChunkReader:
    """Reads the chunks of one streamed chat completion of `model` as events."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._reason: FinishReason | None = None
        self._usage: dict[str, Any] = {}

    def events(self, chunk: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of the next chunk, except `End`; see `end`."""
        self._usage = _object(chunk.get("usage")) or self._usage
        choice = _first(chunk.get("choices"))
        finish_reason = choice.get("finish_reason")
        if finish_reason in _REASONS:
            self._reason = cast(FinishReason, finish_reason)
        delta = _object(choice.get("delta"))
        if text := _text(delta.get("reasoning_content")):
            yield Delta(text, thought=True)
        text, tokens = _text(delta.get("content")), _list(_object(choice.get("logprobs")).get("content"))
        if text or tokens:
            yield Delta(text, logprobs=tuple(map(_logprob, tokens)))
        for call in _list(delta.get("tool_calls")):
            function = _object(call.get("function"))
            id, name, arguments = _text(call.get("id")), _text(function.get("name")), _text(function.get("arguments"))
            yield ToolCallDelta(_count(call.get("index")), id, name, arguments)

    def end(self) -> End:
        """Return the last event of the response. Call this after all events of `events`.

        Raises:
            EngineError: no chunk had a finish reason.
        """
        if self._reason is None:
            raise EngineError("the answer ended without a finish reason; try again", retryable=True)
        prompt, completion, timing = (
            _object(self._usage.get(name))
            for name in ("prompt_tokens_details", "completion_tokens_details", "helexa_timing")
        )
        prefill, decode = (timing.get(name) for name in ("prefill_ms", "decode_ms"))
        return End(
            reason=self._reason,
            model=self._model,
            usage=Usage(
                prompt=_count(self._usage.get("prompt_tokens")),
                cached=_count(prompt.get("cached_tokens")),
                completion=_count(self._usage.get("completion_tokens")),
                reasoning=_count(completion.get("reasoning_tokens")),
            ),
            prefill_s=prefill / 1000 if isinstance(prefill, int | float) else None,
            decode_s=decode / 1000 if isinstance(decode, int | float) else None,
        )


def _logprob(entry: dict[str, Any]) -> TokenLogprob:
    logprob, spelled = entry.get("logprob"), entry.get("bytes")
    return TokenLogprob(
        _text(entry.get("token")),
        float(logprob) if isinstance(logprob, int | float) else float("nan"),
        tuple(map(_count, spelled)) if isinstance(spelled, list) else (),
        tuple(map(_logprob, _list(entry.get("top_logprobs")))),
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _first(choices: Any) -> dict[str, Any]:
    return _object(choices[0]) if isinstance(choices, list) and choices else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
