"""Measures the token usage and timing of a response while it is forwarded."""

import json
import re
from typing import Any

import msgspec
import orjson

from helexa.core.sse import EventParser, first_event_end, last_event_end

BYTES_PER_TOKEN = 4  # typical number of bytes per token of text, for estimates
TAIL_BYTES = 16 << 10
_MAX_MENTIONS = 8
_CONTENT = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|arguments|name)"\s*:\s*"((?:[^"\\]|\\.)++)', re.DOTALL
)
_ENVELOPE_BYTES = 300  # length of the JSON around the content of a non-streamed response
_FAILURE = re.compile(rb'(?:^|\n)data: ?\{"error"')
_FAILURE_MARK = b'{"error"'  # searched before the pattern, because this is faster
_END = re.compile(rb"(?:^|\n)data: ?\[DONE\]")
_END_MARK = b"[DONE]"  # searched before the pattern, because this is faster
_MAX_END_BYTES = 16
_USAGE = b'"usage"'
_FLAT_OBJECT = re.compile(rb"\s*:\s*(\{(?:[^{}]++|\{[^{}]*+\})*+\})")  # at most two levels of nested objects
_COUNTS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens")
_NUMBERS = frozenset({int, float})
_decoder = json.JSONDecoder()


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one response."""

    prompt: int = 0  # number of prompt tokens, including `cached`
    completion: int = 0  # number of completion tokens
    cached: int = 0  # number of prompt tokens that the node read from its prefix cache


class Meter:
    """Measures one response while the gateway forwards its bytes to the client.

    The meter stores only the last bytes of the response. It parses them once, at the end of the response.
    """

    def __init__(self, *, streamed: bool) -> None:
        # when the first generated content of a stream arrived (`time.perf_counter`); None if none has arrived
        self.first_at: float | None = None
        # when the latest bytes arrived (`time.perf_counter`); None if none have arrived
        self.last_at: float | None = None
        self.produced = 0  # number of stream events with content so far
        self._streamed = streamed
        self._bytes = 0  # bytes of a whole response, or of the content of a stream
        self._event_bytes = 0  # bytes of an event around its content, estimated from the first content
        self._tail = bytearray()

    def feed(self, chunk: bytes, now: float) -> None:
        """Process the next bytes, which arrived at `now` (`time.perf_counter`)."""
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
        """Return whether `data: [DONE]` ends within the stream's last `last` bytes."""
        stream_tail, search_start = self._tail, max(0, len(self._tail) - last - _MAX_END_BYTES)
        if not self._streamed or stream_tail.find(_END_MARK, search_start) < 0:
            return False
        return _END.search(stream_tail, search_start) is not None

    def failed(self) -> bool:
        """Return whether the last events of a stream include an error event."""
        return self._streamed and _FAILURE_MARK in self._tail and _FAILURE.search(self._tail) is not None

    def estimated_tokens(self) -> int:
        """Return the estimated output tokens: 1 per 4 bytes, at least 1 per content event."""
        content = self._bytes if self._streamed else self._bytes - _ENVELOPE_BYTES
        return max(self.produced, content // BYTES_PER_TOKEN, 0)

    def usage(self) -> Usage | None:
        """Return the counts of the last `usage` object; None if the last bytes have none."""
        # Generated text that contains `"usage"` is not mistaken for this object, because JSON strings escape quotes.
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
    """Return the token counts of a parsed `usage` object; None if it has none.

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
            pass  # a string contains braces, which `_any_object` handles, or the object is not JSON
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


MAX_BUFFERED_BYTES = 4 << 20
_EVENT = re.compile(rb"event: ?(response\.(?:[a-z_.]+\.delta|completed|incomplete|failed)|error)\r?\n")
_DELTA = b".delta"
_DELTA_TEXT = re.compile(
    rb'event: ?response\.[a-z_.]+\.delta\r?\ndata:[^\n]*?"delta"\s*:\s*"((?:[^"\\]|\\.)*+)', re.DOTALL
)
_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
_MAX_BLANK_BYTES = 3


class _Response(msgspec.Struct):
    """The fields that the meter reads from a response object."""

    usage: Any = None


class _LastEvent(msgspec.Struct):
    response: _Response


_response = msgspec.json.Decoder(_Response)
_last_event = msgspec.json.Decoder(_LastEvent)


class ResponseMeter(Meter):
    """Measures one response of `/v1/responses` while it is forwarded.

    A response repeats the tools, schemas and instructions of its request, which could look like events or usage. The
    meter therefore recognizes whole events by their names. It reads the usage only from the last event of a stream, or
    from a complete response. It ignores a response or event that is longer than `MAX_BUFFERED_BYTES`.
    """

    def __init__(self, *, streamed: bool) -> None:
        super().__init__(streamed=streamed)
        self._ended = False
        self._failed = False
        self._too_long = False  # the current event or response is too long to be buffered
        self._usage: Usage | None = None

    def feed(self, chunk: bytes, now: float) -> None:
        """Process the next bytes, which arrived at `now` (`time.perf_counter`)."""
        self.last_at = now
        buffered = self._tail
        if not self._streamed:
            self._bytes += len(chunk)
        if self._streamed and not buffered and chunk.endswith(b"\n\n"):  # usually, a chunk contains whole events
            self._read(chunk, now)
            return
        buffered += chunk
        if self._streamed:
            if self._too_long and (end := first_event_end(buffered)):
                self._too_long = False
                del buffered[:end]
            end = last_event_end(buffered, max(0, len(buffered) - len(chunk) - _MAX_BLANK_BYTES), len(buffered))
            if end and not self._too_long:
                self._read(bytes(buffered[:end]), now)
                del buffered[:end]
        if self._too_long or len(buffered) > MAX_BUFFERED_BYTES:
            self._too_long = True
            del buffered[:-_MAX_BLANK_BYTES]

    def ended(self, last: int) -> bool:
        """Return whether the stream's final event has arrived. `last` is ignored."""
        return self._ended

    def failed(self) -> bool:
        """Return whether the stream so far contains an `error` or `response.failed` event."""
        return self._failed

    def usage(self) -> Usage | None:
        """Return the token counts of the response.

        The result is None if the response has not ended, has no token counts, or was too long to be buffered.
        """
        if not self._streamed and not self._too_long and self._usage is None:
            self._usage = _decode_usage(_response, self._tail)
        return self._usage

    def _read(self, events: bytes, now: float) -> None:
        names: list[bytes] = _EVENT.findall(events)
        other_names = [name for name in names if not name.endswith(_DELTA)]
        if len(other_names) < len(names):
            self.produced += len(names) - len(other_names)
            self._bytes += sum(map(len, _DELTA_TEXT.findall(events)))
            self.first_at = self.first_at or now
        if other_names:
            for event in EventParser().feed(events):
                if event.event in _LAST_EVENTS:
                    self._ended = True
                    self._usage = _decode_usage(_last_event, event.data)
                self._failed |= event.event in ("error", "response.failed")


def _decode_usage(decoder: "msgspec.json.Decoder[Any]", data: bytearray | str) -> Usage | None:
    try:
        event = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return usage_of((event.response if isinstance(event, _LastEvent) else event).usage)
