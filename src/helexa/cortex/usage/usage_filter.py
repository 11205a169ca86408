"""Removes the event with the token usage from a stream if the client did not request usage."""

import re

import orjson

from helexa.core.sse import first_event_end, last_event_end

MAX_BUFFERED_BYTES = 64 << 10

_USAGE = b'"usage"'
_USAGE_OBJECT = re.compile(rb'"usage"\s*:\s*\{')
_DONE_EVENT = re.compile(rb"data: ?\[")


class UsageFilter:
    """Removes usage events from a chat or completion stream: events with `usage` and empty `choices`.

    The gateway requests usage from every node. A client that did not request usage may read `choices[0]` of every
    event, as OpenAI's own examples do, and would fail at a usage event. An incomplete event is buffered until it is
    complete or longer than `MAX_BUFFERED_BYTES`. The final `[DONE]` is never buffered.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._event_begun = False  # True if the beginning of the current event was already passed on

    def feed(self, chunk: bytes) -> bytes:
        """Process the next bytes of the stream, and return the bytes to forward to the client now."""
        if not self._buffer and chunk.find(_USAGE) < 0 and chunk.endswith(b"\n\n"):
            self._event_begun = False
            return chunk
        data = self._buffer + chunk
        end = last_event_end(data, 0, len(data))
        events, partial_event = data[:end], data[end:]
        if _USAGE in events:
            events = self._without_usage(events)
        if end:
            self._event_begun = False
        if self._event_begun or len(partial_event) > MAX_BUFFERED_BYTES or _DONE_EVENT.match(partial_event):
            self._buffer, self._event_begun = b"", bool(partial_event)
            return events + partial_event
        self._buffer = partial_event
        return events

    def flush(self) -> bytes:
        """Return the bytes that are still buffered. The caller calls this at the end of the stream."""
        buffered, self._buffer = self._buffer, b""
        return buffered

    def _without_usage(self, events: bytes) -> bytes:
        passed_on: list[bytes] = []
        pass_from, usage_at = 0, events.find(_USAGE)
        while usage_at >= 0:
            start = max(pass_from, last_event_end(events, pass_from, usage_at))
            end = first_event_end(events, usage_at) or len(events)
            if not (start == 0 and self._event_begun) and _is_usage(events[start:end]):
                passed_on.append(events[pass_from:start])
                pass_from = end
            usage_at = events.find(_USAGE, end)
        return b"".join([*passed_on, events[pass_from:]])


def _is_usage(event: bytes) -> bool:
    if _USAGE_OBJECT.search(event) is None:
        return False
    try:
        chunk = orjson.loads(event.partition(b"data:")[2])
    except orjson.JSONDecodeError:
        return False
    return isinstance(chunk, dict) and chunk.get("choices") == [] and isinstance(chunk.get("usage"), dict)
