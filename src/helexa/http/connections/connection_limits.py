"""Limits on the number of a listener's open connections."""

from dataclasses import dataclass

MAX_CONNECTIONS = 4096

_RESERVED = 64  # descriptors for listening sockets, databases, logs and the event loop
_MIN_CONNECTIONS = 4


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one listener.

    Attributes:
        total: largest number of served connections.
        per_address: largest number of served connections of one client address.
        rejected: largest number of connections above these limits that are accepted to send them a 503. Further
            connections wait in the kernel's backlog.
    """

    total: int
    per_address: int
    rejected: int

    @property
    def open(self) -> int:
        """Largest number of open connections, which is the largest number of descriptors that they use."""
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
        """Return limits that leave descriptors for all other uses.

        Args:
            descriptors: limit on open files of this process.
            total: largest number of connections.
            per_address: largest number per client address. If None, half of the resulting total: one client cannot use
                all connections, and a reverse proxy, whose clients share one address, can still use many.
            each: descriptors of one connection, including requests made on its behalf.
            others: descriptors that the process needs for other purposes.
        """
        rejected_limit = max(_MIN_CONNECTIONS, min(256, descriptors // 8))
        total = max(_MIN_CONNECTIONS, min(total, (descriptors - _RESERVED - others - rejected_limit) // each))
        return cls(total, min(total, per_address or max(1, total // 2)), rejected_limit)
