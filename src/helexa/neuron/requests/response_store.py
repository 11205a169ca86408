"""Store responses of the Responses API in memory. A later request can continue a stored conversation."""

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from helexa.neuron.config import ResponsesConfig


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response, together with the conversation that it ends.

    Attributes:
        principal: name of the principal (API key owner) that owns the response. Other principals cannot read it.
        body: the response body as JSON.
        items: all items of the conversation, including the output items of the response, as a JSON list.
        until: time at which the response expires, in seconds of the store's clock.
    """

    principal: str
    body: bytes
    items: bytes
    until: float

    @property
    def size(self) -> int:
        """Size of the response and its conversation in bytes, for the store's memory limit."""
        return len(self.body) + len(self.items)


class ResponseStore:
    """Stores responses of the Responses API in memory until they expire.

    If a limit on bytes or entries is exceeded, the store removes the oldest response of the principal that uses the
    most bytes. A principal that fills the store therefore loses its own responses first.
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
        """Whether the configuration permits storing responses."""
        return self._most_bytes > 0

    @property
    def prefix(self) -> str:
        """Prefix of all response ids of this process. It shows a gateway which node stores a response."""
        return f"resp_{self._mark}"

    def new_stem(self) -> str:
        """Return a new random string. The ids of one response and of all its items contain this string."""
        return self._mark + secrets.token_hex(12)

    def put(self, id: str, principal: str, body: bytes, items: bytes) -> None:
        """Store a response. If it is larger than the memory limit of the whole store, do nothing.

        Args:
            id: id of the response.
            principal: name of the principal that owns the response.
            body: the response body as JSON.
            items: all items of the conversation, including those of the response, as a JSON list.
        """
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
        """Return the response with the id `id`; None if `principal` owns no such response or it has expired."""
        self._expire()
        entry = self._entries.get(id)
        return entry if entry is not None and entry.principal == principal else None

    def remove(self, id: str, principal: str) -> bool:
        """Remove the response with the id `id`. Return False if `principal` owns no such response."""
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
