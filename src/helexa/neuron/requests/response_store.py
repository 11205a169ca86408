"""Responses that were given, kept in memory for a while so that the next one may go on from them."""

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from helexa.neuron.config import ResponsesConfig


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response.

    Attributes:
        principal: whose it is; nobody else finds it.
        body: the response itself, JSON.
        items: the conversation until its end, input and output, JSON.
        until: when it ends, on the store's clock.
    """

    principal: str
    body: bytes
    items: bytes
    until: float

    @property
    def size(self) -> int:
        """Bytes that it counts for."""
        return len(self.body) + len(self.items)


class ResponseStore:
    """Keeps responses until their time is over or there is no room, whichever comes first.

    Room is made at the expense of the principal who has most of it, oldest first: so one who fills the store loses
    his own.
    """

    def __init__(self, config: ResponsesConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._mark = secrets.token_hex(4)
        self._most_bytes = config.store_mb << 20
        self._most_entries = config.store_entries
        self._seconds = config.store_secs
        self._clock = clock
        self._entries: dict[str, StoredResponse] = {}  # the oldest first
        self._held: Counter[str] = Counter()  # bytes by principal
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def enabled(self) -> bool:
        """Whether anything is kept at all."""
        return self._most_bytes > 0

    @property
    def prefix(self) -> str:
        """How the ids of its responses begin: otherwise in each process, so that a gateway finds the one to ask."""
        return f"resp_{self._mark}"

    def new_stem(self) -> str:
        """What the ids of a response and of its items have in common."""
        return self._mark + secrets.token_hex(12)

    def put(self, id: str, principal: str, body: bytes, items: bytes) -> None:
        """Keep a response; one that is larger than all the room is not kept."""
        entry = StoredResponse(principal, body, items, self._clock() + self._seconds)
        if entry.size > self._most_bytes:
            return
        self._expire()
        self._entries[id] = entry
        self._held[principal] += entry.size
        self._bytes += entry.size
        while self._bytes > self._most_bytes or len(self._entries) > self._most_entries:
            greediest = max(self._held, key=self._held.__getitem__)
            self._drop(next(id for id, entry in self._entries.items() if entry.principal == greediest))

    def find(self, id: str, principal: str) -> StoredResponse | None:
        """The response with this id, if it is this principal's."""
        self._expire()
        entry = self._entries.get(id)
        return entry if entry is not None and entry.principal == principal else None

    def remove(self, id: str, principal: str) -> bool:
        """Forget a response; whether it was there."""
        found = self.find(id, principal) is not None
        if found:
            self._drop(id)
        return found

    def _expire(self) -> None:
        now = self._clock()
        while self._entries and next(iter(self._entries.values())).until <= now:
            self._drop(next(iter(self._entries)))

    def _drop(self, id: str) -> None:
        entry = self._entries.pop(id)
        self._bytes -= entry.size
        self._held[entry.principal] -= entry.size
        if not self._held[entry.principal]:
            del self._held[entry.principal]
