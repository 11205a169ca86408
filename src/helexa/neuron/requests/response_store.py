"""Keep responses in memory for a limited time, so that a later request can continue from a response."""

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from helexa.neuron.config import ResponsesConfig


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that the node keeps, together with its conversation.

    Attributes:
        principal: principal that owns the response; other principals cannot find it.
        body: the response as JSON.
        items: the whole conversation, including the response's output, as JSON.
        until: time of expiry, on the store's clock.
    """

    principal: str
    body: bytes
    items: bytes
    until: float

    @property
    def size(self) -> int:
        """Return the size in bytes that counts toward the store's memory limit."""
        return len(self.body) + len(self.items)


class ResponseStore:
    """Keeps responses until they expire or the limits are reached.

    At a limit, the store drops the oldest response of the principal with the most bytes. A principal that fills the
    store therefore loses its own responses first.
    """

    def __init__(self, config: ResponsesConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._mark = secrets.token_hex(4)
        self._most_bytes = config.store_mb << 20
        self._most_entries = config.store_entries
        self._seconds = config.store_secs
        self._clock = clock
        self._entries: dict[str, StoredResponse] = {}  # oldest first
        self._bytes_by_principal: Counter[str] = Counter()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def enabled(self) -> bool:
        """Return whether the configuration enables the store."""
        return self._most_bytes > 0

    @property
    def prefix(self) -> str:
        """Prefix of the ids of this process's responses. A gateway uses the prefix to find the node that stores a

        A gateway uses the prefix to find the node that stores a response.
        """
        return f"resp_{self._mark}"

    def new_stem(self) -> str:
        """Return a new random string that the ids of a response and of its items have in common."""
        return self._mark + secrets.token_hex(12)

    def put(self, id: str, principal: str, body: bytes, items: bytes) -> None:
        """Store a response, unless it is larger than the whole store."""
        entry = StoredResponse(principal, body, items, self._clock() + self._seconds)
        if entry.size > self._most_bytes:
            return
        self._expire()
        self._entries[id] = entry
        self._bytes_by_principal[principal] += entry.size
        self._bytes += entry.size
        while self._bytes > self._most_bytes or len(self._entries) > self._most_entries:
            greediest = max(self._bytes_by_principal, key=self._bytes_by_principal.__getitem__)
            self._drop(next(id for id, entry in self._entries.items() if entry.principal == greediest))

    def find(self, id: str, principal: str) -> StoredResponse | None:
        """Return the response with this id, or None if `principal` has no response with the id."""
        self._expire()
        entry = self._entries.get(id)
        return entry if entry is not None and entry.principal == principal else None

    def remove(self, id: str, principal: str) -> bool:
        """Remove the response with this id. Return whether `principal` had such a response."""
        exists = self.find(id, principal) is not None
        if exists:
            self._drop(id)
        return exists

    def _expire(self) -> None:
        now = self._clock()
        while self._entries and next(iter(self._entries.values())).until <= now:
            self._drop(next(iter(self._entries)))

    def _drop(self, id: str) -> None:
        entry = self._entries.pop(id)
        self._bytes -= entry.size
        self._bytes_by_principal[entry.principal] -= entry.size
        if not self._bytes_by_principal[entry.principal]:
            del self._bytes_by_principal[entry.principal]
