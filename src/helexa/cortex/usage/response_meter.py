"""Usage and timing that the gateway reads from a response of `/v1/responses`, or from its event stream."""

import re
from typing import Any

import msgspec

from helexa.core.sse import EventParser, first_event_end, last_event_end
from helexa.cortex.usage.meter import Meter, Usage, usage_of

MAX_HELD_BYTES = 4 << 20
_EVENT = re.compile(rb"event: ?(response\.(?:[a-z_.]+\.delta|completed|incomplete|failed)|error)\r?\n")
_DELTA = b".delta"
_DELTA_TEXT = re.compile(
    rb'event: ?response\.[a-z_.]+\.delta\r?\ndata:[^\n]*?"delta"\s*:\s*"((?:[^"\\]|\\.)*+)', re.DOTALL
)
_LAST = ("response.completed", "response.incomplete", "response.failed")
_LONGEST_BLANK = 3


class _Response(msgspec.Struct):
    """The read fields of a response."""

    usage: Any = None


class _LastEvent(msgspec.Struct):
    response: _Response


_response = msgspec.json.Decoder(_Response)
_last_event = msgspec.json.Decoder(_LastEvent)


class ResponseMeter(Meter):
    """Reads one response of `/v1/responses` as it passes.

    A response repeats parts of its request: tools, schemas, instructions. The meter therefore counts only whole events
    by their names, and reads the usage only from the last event, or from a whole response. A response or event longer
    than `MAX_HELD_BYTES` is not read.
    """

    def __init__(self, *, streamed: bool) -> None:
        super().__init__(streamed=streamed)
        self._ended = False
        self._failed = False
        self._lost = False  # the current event or response is too long to be buffered
        self._usage: Usage | None = None

    def feed(self, chunk: bytes, now: float) -> None:
        """Process the next bytes, received at `now`."""
        self.last_at = now
        buffered = self._tail
        if not self._streamed:
            self._bytes += len(chunk)
        if self._streamed and not buffered and chunk.endswith(b"\n\n"):  # the usual case: whole events
            self._read(chunk, now)
            return
        buffered += chunk
        if self._streamed:
            if self._lost and (end := first_event_end(buffered)):
                self._lost = False
                del buffered[:end]
            end = last_event_end(buffered, max(0, len(buffered) - len(chunk) - _LONGEST_BLANK), len(buffered))
            if end and not self._lost:
                self._read(bytes(buffered[:end]), now)
                del buffered[:end]
        if self._lost or len(buffered) > MAX_HELD_BYTES:
            self._lost = True
            del buffered[:-_LONGEST_BLANK]

    def ended(self, last: int) -> bool:
        """Return whether the last event of a stream has arrived completely."""
        return self._ended

    def failed(self) -> bool:
        """Return whether the stream contains an error event."""
        return self._failed

    def usage(self) -> Usage | None:
        """Return the response's usage, or None before the end and for a response without usage."""
        if not self._streamed and not self._lost and self._usage is None:
            self._usage = _said(_response, self._tail)
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
                if event.event in _LAST:
                    self._ended = True
                    self._usage = _said(_last_event, event.data)
                self._failed |= event.event in ("error", "response.failed")


def _said(decoder: "msgspec.json.Decoder[Any]", data: bytearray | str) -> Usage | None:
    try:
        event = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return usage_of((event.response if isinstance(event, _LastEvent) else event).usage)
