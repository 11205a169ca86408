"""Removes the usage chunk from a stream whose client did not request it."""

import re

import orjson

from helexa.core.sse import first_event_end, last_event_end

MAX_HELD_BYTES = 64 << 10

_USAGE = b'"usage"'
_USAGE_OBJECT = re.compile(rb'"usage"\s*:\s*\{')
_DONE = re.compile(rb"data: ?\[")


class UsageFilter:
    """Passes a chat or completion stream on, except events with `usage` and empty `choices`.

    The gateway requests usage from every node. Clients that did not request usage index `choices[0]` of every chunk, as
    OpenAI's own examples do. If an event is split across reads, its first part is held until the event is complete or
    longer than `MAX_HELD_BYTES`. `[DONE]` is never held.
    """

    def __init__(self) -> None:
        self._held = b""
        self._inside = False  # True if the beginning of the current event was passed on

    def feed(self, chunk: bytes) -> bytes:
        """Process the next bytes and return the bytes to pass on."""
        if not self._held and chunk.find(_USAGE) < 0 and chunk.endswith(b"\n\n"):
            self._inside = False
            return chunk
        data = self._held + chunk
        end = last_event_end(data, 0, len(data))
        events, partial_event = data[:end], data[end:]
        if _USAGE in events:
            events = self._without_usage(events)
        if end:
            self._inside = False
        if self._inside or len(partial_event) > MAX_HELD_BYTES or _DONE.match(partial_event):
            self._held, self._inside = b"", bool(partial_event)
            return events + partial_event
        self._held = partial_event
        return events

    def flush(self) -> bytes:
        """Return the held bytes at the end of the stream."""
        held_bytes, self._held = self._held, b""
        return held_bytes

    def _without_usage(self, events: bytes) -> bytes:
        kept_parts: list[bytes] = []
        kept_from, usage_at = 0, events.find(_USAGE)
        while usage_at >= 0:
            start = max(kept_from, last_event_end(events, kept_from, usage_at))
            end = first_event_end(events, usage_at) or len(events)
            if not (start == 0 and self._inside) and _is_usage(events[start:end]):
                kept_parts.append(events[kept_from:start])
                kept_from = end
            usage_at = events.find(_USAGE, end)
        return b"".join([*kept_parts, events[kept_from:]])


def _is_usage(event: bytes) -> bool:
    if _USAGE_OBJECT.search(event) is None:
        return False
    try:
        chunk = orjson.loads(event.partition(b"data:")[2])
    except orjson.JSONDecodeError:
        return False
    return isinstance(chunk, dict) and chunk.get("choices") == [] and isinstance(chunk.get("usage"), dict)
