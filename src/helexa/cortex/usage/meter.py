"""What a gateway can tell from an answer's bytes as they pass: when it spoke first and last, and what it used."""

import json
import re
from typing import Any

import msgspec
import orjson

from helexa.cortex.usage.token_limit import BYTES_PER_TOKEN

TAIL_BYTES = 16 << 10
_MAX_MENTIONS = 8
_SPOKEN = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|arguments|name)"\s*:\s*"((?:[^"\\]|\\.)++)', re.DOTALL
)
_ENVELOPE_BYTES = 300  # of an answer that is not streamed
_FAILURE = re.compile(rb'(?:^|\n)data: ?\{"error"')
_END = re.compile(rb"(?:^|\n)data: ?\[DONE\]")
_END_MARK = b"[DONE]"  # quicker to look for
_LONGEST_END = 16
_USAGE = b'"usage"'
_FLAT_OBJECT = re.compile(rb"\s*:\s*(\{(?:[^{}]++|\{[^{}]*+\})*+\})")  # objects in it, but none in those
_COUNTS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens")
_NUMBERS = frozenset({int, float})
_decoder = json.JSONDecoder()


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one answer; `cached` are among the prompt's."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Meter:
    """Reads along one answer. It keeps a bounded tail and parses it once, at the end.

    Attributes:
        first_at: when the first content passed (`time.perf_counter`), None before that.
        last_at: when the last bytes passed.
        produced: events with content so far.
    """

    def __init__(self, *, streamed: bool) -> None:
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.produced = 0
        self._streamed = streamed
        self._bytes = 0  # of the whole answer, or of a stream's content
        self._event_bytes = 0  # of an event beside its content, as far as the first content shows
        self._tail = bytearray()

    def feed(self, chunk: bytes, now: float) -> None:
        """Take the next bytes, seen at `now`."""
        if self._streamed:
            events = chunk.count(b"data:")
            if self.first_at is not None:
                self.produced += events
                self._bytes += len(chunk) - events * self._event_bytes
            elif found := _SPOKEN.findall(chunk):
                self.first_at, self.produced, self._bytes = now, len(found), sum(map(len, found))
                self._event_bytes = (len(chunk) - self._bytes) // max(events, 1)
        else:
            self._bytes += len(chunk)
        self.last_at = now
        self._tail += chunk
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]

    def ended(self, last: int) -> bool:
        """Whether a stream says within its last `last` bytes that it is complete."""
        tail, begin = self._tail, max(0, len(self._tail) - last - _LONGEST_END)
        if not self._streamed or tail.find(_END_MARK, begin) < 0:
            return False
        return _END.search(tail, begin) is not None

    def failed(self) -> bool:
        """Whether a stream has said in its last events that it failed."""
        return self._streamed and _FAILURE.search(self._tail) is not None

    def estimated_tokens(self) -> int:
        """Return about how many tokens passed, for an answer without usage: a quarter of the content's bytes.

        An event with content counts as a token at least.
        """
        content = self._bytes if self._streamed else self._bytes - _ENVELOPE_BYTES
        return max(self.produced, content // BYTES_PER_TOKEN, 0)

    def usage(self) -> Usage | None:
        """The last usage object in the tail, None when there is none. What the node repeats of a text is in a string,
        where the name would be followed by a backslash."""
        end = len(self._tail)
        for _ in range(_MAX_MENTIONS):
            end = self._tail.rfind(_USAGE, 0, end)
            if end < 0:
                return None
            found = _object_after(self._tail, end + len(_USAGE))
            usage = usage_of(found)
            if usage is not None:
                return usage
        return None


def usage_of(found: Any) -> Usage | None:
    """The counts of a usage object; None for what is none, as it counts nothing.

    Chat and completions say prompt and completion, Responses and images say input and output.
    """
    if not isinstance(found, dict) or _NUMBERS.isdisjoint(map(type, map(found.get, _COUNTS))):
        return None
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details")
    return Usage(
        _count(found.get("prompt_tokens") or found.get("input_tokens")),
        _count(found.get("completion_tokens") or found.get("output_tokens")),
        _count(details.get("cached_tokens")) if isinstance(details, dict) else 0,
    )


def _object_after(tail: bytearray, begin: int) -> dict[str, Any] | None:
    found = _FLAT_OBJECT.match(tail, begin)
    if found is not None:
        try:
            return orjson.loads(found[1])
        except orjson.JSONDecodeError:
            pass  # braces within strings, or no JSON at all
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
    if isinstance(value, float) and value.is_integer():  # what 64 bits do not hold is read as one
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
