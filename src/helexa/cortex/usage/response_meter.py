"""What a gateway can tell from a response, or the events of its stream, as its bytes pass."""

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
    """What is looked at of a response."""

    usage: Any = None


class _LastEvent(msgspec.Struct):
    response: _Response


_response = msgspec.json.Decoder(_Response)
_last_event = msgspec.json.Decoder(_LastEvent)


class ResponseMeter(Meter):
    """Reads along one answer of `/v1/responses`.

    A response repeats what its request said: tools, schemas, instructions. So nothing counts but whole events by their
    names, and of the last one, or of a whole answer, the response's own usage. What is longer than `MAX_HELD_BYTES` is
    not read.
    """

    def __init__(self, *, streamed: bool) -> None:
        super().__init__(streamed=streamed)
        self._ended = False
        self._failed = False
        self._lost = False  # what came was too long to be held
        self._usage: Usage | None = None

    def feed(self, chunk: bytes, now: float) -> None:
        """Take the next bytes, seen at `now`."""
        self.last_at = now
        held = self._tail
        if not self._streamed:
            self._bytes += len(chunk)
        if self._streamed and not held and chunk.endswith(b"\n\n"):  # as nodes send them
            self._read(chunk, now)
            return
        held += chunk
        if self._streamed:
            if self._lost and (end := first_event_end(held)):
                self._lost = False
                del held[:end]
            end = last_event_end(held, max(0, len(held) - len(chunk) - _LONGEST_BLANK), len(held))
            if end and not self._lost:
                self._read(bytes(held[:end]), now)
                del held[:end]
        if self._lost or len(held) > MAX_HELD_BYTES:
            self._lost = True
            del held[:-_LONGEST_BLANK]

    def ended(self, last: int) -> bool:
        """Whether the last event of a stream is there as a whole."""
        return self._ended

    def failed(self) -> bool:
        """Whether a stream has said that it failed."""
        return self._failed

    def usage(self) -> Usage | None:
        """The response's usage, None before its end and when there is none."""
        if not self._streamed and not self._lost and self._usage is None:
            self._usage = _said(_response, self._tail)
        return self._usage

    def _read(self, events: bytes, now: float) -> None:
        names: list[bytes] = _EVENT.findall(events)
        others = [name for name in names if not name.endswith(_DELTA)]
        if len(others) < len(names):
            self.produced += len(names) - len(others)
            self._bytes += sum(map(len, _DELTA_TEXT.findall(events)))
            self.first_at = self.first_at or now
        if others:
            for event in EventParser().feed(events):
                if event.event in _LAST:
                    self._ended = True
                    self._usage = _said(_last_event, event.data)
                self._failed |= event.event in ("error", "response.failed")


def _said(decoder: "msgspec.json.Decoder[Any]", data: bytearray | str) -> Usage | None:
    try:
        found = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return usage_of((found.response if isinstance(found, _LastEvent) else found).usage)
