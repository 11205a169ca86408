"""How many connections a listener may have open."""

from dataclasses import dataclass

MAX_CONNECTIONS = 4096

_RESERVED = 64  # descriptors for listening sockets, databases, logs and the event loop
_FEWEST = 4


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one listener.

    Attributes:
        total: connections that are served at a time.
        per_address: connections of one client address that are served at a time.
        rejected: connections over these limits that are open for a 503. Further ones wait in the kernel's backlog.
    """

    total: int
    per_address: int
    rejected: int

    @property
    def open(self) -> int:
        """Descriptors that the listener takes at most."""
        return self.total + self.rejected

    @classmethod
    def within(
        cls,
        descriptors: int,
        total: int = MAX_CONNECTIONS,
        per_address: int | None = None,
        *,
        each: int = 1,
        others: int = 0,
    ) -> "ConnectionLimits":
        """Return limits that leave descriptors for everything else.

        Args:
            descriptors: the limit on open files of this process.
            total: the largest number of connections.
            per_address: half of the resulting total if None, so that a client cannot use all connections, while a
                reverse proxy, whose clients share one address, still can use many.
            each: descriptors that one connection takes, for itself and for the requests made on its behalf.
            others: descriptors that the process needs for other purposes.
        """
        rejected_limit = max(_FEWEST, min(256, descriptors // 8))
        total = max(_FEWEST, min(total, (descriptors - _RESERVED - others - rejected_limit) // each))
        return cls(total, min(total, per_address or max(1, total // 2)), rejected_limit)
