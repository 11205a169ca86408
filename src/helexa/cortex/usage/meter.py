"""Measures the token usage and the timing of a response while the gateway forwards its bytes to the client."""

import json
import re
from typing import Any

import msgspec
import orjson

from helexa.cortex.usage.token_limit import BYTES_PER_TOKEN

TAIL_BYTES = 16 << 10
_MAX_MENTIONS = 8
_CONTENT = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|arguments|name)"\s*:\s*"((?:[^"\\]|\\.)++)', re.DOTALL
)
_ENVELOPE_BYTES = 300  # JSON around the content of a non-streamed response
_FAILURE = re.compile(rb'(?:^|\n)data: ?\{"error"')
_END = re.compile(rb"(?:^|\n)data: ?\[DONE\]")
_END_MARK = b"[DONE]"  # a faster search than the pattern
_MAX_END_BYTES = 16
_USAGE = b'"usage"'
_FLAT_OBJECT = re.compile(rb"\s*:\s*(\{(?:[^{}]++|\{[^{}]*+\})*+\})")  # at most two levels of nested objects
_COUNTS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens")
_NUMBERS = frozenset({int, float})
_decoder = json.JSONDecoder()


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one response.

    Attributes:
        prompt: number of prompt tokens, including `cached`.
        completion: number of completion tokens.
        cached: number of prompt tokens that the node read from its prefix cache.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Meter:
    """Measures one response while the gateway forwards its bytes to the client.

    The meter stores only the last bytes of the response. It parses them once, at the end of the response.

    Attributes:
        first_at: when the first generated content arrived (`time.perf_counter`); None if none has arrived.
        last_at: when the latest bytes arrived (`time.perf_counter`); None if none have arrived.
        produced: number of stream events with content so far.
    """

    def __init__(self, *, streamed: bool) -> None:
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.produced = 0
        self._streamed = streamed
        self._bytes = 0  # bytes of a whole response, or of the content of a stream
        self._event_bytes = 0  # bytes of an event around its content, estimated from the first content
        self._tail = bytearray()

    def feed(self, chunk: bytes, now: float) -> None:
        """Process the next bytes of the response, which arrived at `now` (`time.perf_counter`)."""
        if self._streamed:
            events = chunk.count(b"data:")
            if self.first_at is not None:
                self.produced += events
                self._bytes += len(chunk) - events * self._event_bytes
            elif deltas := _CONTENT.findall(chunk):
                self.first_at, self.produced, self._bytes = now, len(deltas), sum(map(len, deltas))
                self._event_bytes = (len(chunk) - self._bytes) // max(events, 1)
        else:
            self._bytes += len(chunk)
        self.last_at = now
        self._tail += chunk
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]

    def ended(self, last: int) -> bool:
        """Return whether the final event of a stream (`data: [DONE]`) ends within the stream's last `last` bytes."""
        stream_tail, search_start = self._tail, max(0, len(self._tail) - last - _MAX_END_BYTES)
        if not self._streamed or stream_tail.find(_END_MARK, search_start) < 0:
            return False
        return _END.search(stream_tail, search_start) is not None

    def failed(self) -> bool:
        """Return whether the last events of a stream include an error event."""
        return self._streamed and _FAILURE.search(self._tail) is not None

    def estimated_tokens(self) -> int:
        """Return the estimated number of output tokens of a response that contains no usage.

        The estimate is one token per four bytes of content, but at least one token per event with content.
        """
        content = self._bytes if self._streamed else self._bytes - _ENVELOPE_BYTES
        return max(self.produced, content // BYTES_PER_TOKEN, 0)

    def usage(self) -> Usage | None:
        """Return the token counts of the last `usage` object in the response, or None if there is none.

        Generated text that contains `"usage"` is not mistaken for this object, because JSON strings escape quotes.
        """
        end = len(self._tail)
        for _ in range(_MAX_MENTIONS):
            end = self._tail.rfind(_USAGE, 0, end)
            if end < 0:
                return None
            usage_object = _object_after(self._tail, end + len(_USAGE))
            usage = usage_of(usage_object)
            if usage is not None:
                return usage
        return None


def usage_of(value: Any) -> Usage | None:
    """Return the token counts of a parsed `usage` object, or None if `value` is not a usage object.

    The chat and completions APIs have `prompt_tokens` and `completion_tokens`. The Responses and images APIs have
    `input_tokens` and `output_tokens`.
    """
    if not isinstance(value, dict) or _NUMBERS.isdisjoint(map(type, map(value.get, _COUNTS))):
        return None
    details = value.get("prompt_tokens_details") or value.get("input_tokens_details")
    return Usage(
        _count(value.get("prompt_tokens") or value.get("input_tokens")),
        _count(value.get("completion_tokens") or value.get("output_tokens")),
        _count(details.get("cached_tokens")) if isinstance(details, dict) else 0,
    )


def _object_after(tail: bytearray, begin: int) -> dict[str, Any] | None:
    match = _FLAT_OBJECT.match(tail, begin)
    if match is not None:
        try:
            return orjson.loads(match[1])
        except orjson.JSONDecodeError:
            pass  # braces within strings, or not JSON
    return _any_object(tail[begin:].decode("utf-8", "replace"))


def _any_object(text: str) -> dict[str, Any] | None:
    text = text.lstrip()
    if not text.startswith(":"):
        return None
    try:
        value, _ = _decoder.raw_decode(text[1:].lstrip())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _count(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():  # orjson reads integers above 64 bits as floats
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
