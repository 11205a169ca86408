"""Measures the token usage and the timing of a response of `/v1/responses`, streamed or not."""

import re
from typing import Any

import msgspec

from helexa.core.sse import EventParser, first_event_end, last_event_end
from helexa.cortex.usage.meter import Meter, Usage, usage_of

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
    """Measures one response of `/v1/responses` while the gateway forwards its bytes to the client.

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
        """Process the next bytes of the response, which arrived at `now` (`time.perf_counter`)."""
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
        """Return whether the final event of a stream, such as `response.completed`, has arrived completely."""
        return self._ended

    def failed(self) -> bool:
        """Return whether the stream so far contains an `error` or `response.failed` event."""
        return self._failed

    def usage(self) -> Usage | None:
        """Return the token counts of the response, or None if the response is incomplete or contains no usage."""
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
