"""Limits on the number of open connections of a server."""

from dataclasses import dataclass

MAX_CONNECTIONS = 4096

_RESERVED = 64  # descriptors for listening sockets, databases, logs and the event loop
_MIN_CONNECTIONS = 4


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the number of open connections of one server.

    Attributes:
        total: maximum number of connections whose requests are served.
        per_address: maximum number of connections from one client address whose requests are served.
        rejected: maximum number of additional connections, which are accepted only to send them a 503. Further
            connections wait in the kernel's backlog.
    """

    total: int
    per_address: int
    rejected: int

    @property
    def open(self) -> int:
        """Maximum number of open connections. Each uses one file descriptor."""
        return self.total + self.rejected

    @classmethod
    def within(
        cls,
        descriptors: int,
        total: int = MAX_CONNECTIONS,
        per_address: int | None = None,
        *,
        each: int = 1,
        other_descriptors: int = 0,
    ) -> "ConnectionLimits":
        """Return limits under which the process does not run out of file descriptors.

        Args:
            descriptors: limit on open files of this process.
            total: maximum number of served connections. It is reduced if there are not enough descriptors.
            per_address: maximum number of served connections per client address. None means half of `total`: one
                client cannot use all connections, but a reverse proxy with many clients still gets enough.
            each: number of descriptors that one connection needs. A gateway also counts the connections to nodes that
                it opens for the requests of the connection.
            other_descriptors: number of descriptors that the process needs for other purposes.
        """
        rejected_limit = max(_MIN_CONNECTIONS, min(256, descriptors // 8))
        total = max(
            _MIN_CONNECTIONS, min(total, (descriptors - _RESERVED - other_descriptors - rejected_limit) // each)
        )
        return cls(total, min(total, per_address or max(1, total // 2)), rejected_limit)
