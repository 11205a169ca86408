"""State that the connections of a server share: memory limit, open connections."""

import asyncio
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Protocol

from starlette.types import ASGIApp

from helexa.core.errors import overloaded
from helexa.http.idle_connections import IdleConnections

DEFAULT_BYTES = 512 << 20

_RETRY_SECS = 2


class BodyBudget:
    """Memory limit for the request bodies of all connections of a server."""

    def __init__(self, total: int = DEFAULT_BYTES) -> None:
        self.total = total  # the limit in bytes. It may be changed at any time.
        self.reserved = 0  # number of bytes that are reserved at present
        self._by_address: dict[str, int] = {}

    # One client address may use at most half of the memory, so one client cannot block all others.
    def reserve(self, address: str, size: int) -> None:
        """Reserve `size` bytes of memory for a request body from the client at `address`.

        Raises:
            ApiError: 503 if more than `total` would be reserved, or more than half of `total` by this client. Nothing
                is reserved then.
        """
        address_bytes = self._by_address.get(address, 0) + size
        if self.reserved + size > self.total or address_bytes > self.total // 2:
            raise overloaded(
                f"the bodies of the requests in progress would exceed {self.total >> 20} MiB in total, or "
                f"{self.total >> 21} MiB of one client; try again in {_RETRY_SECS} s, or raise "
                "gateway.max_body_memory_mb of a gateway",
                _RETRY_SECS,
            )
        self.reserved += size
        self._by_address[address] = address_bytes

    def release(self, address: str, size: int) -> None:
        """Release `size` bytes that were reserved for the client address `address`."""
        self.reserved -= size
        remaining_bytes = self._by_address[address] - size
        if remaining_bytes:
            self._by_address[address] = remaining_bytes
        else:
            del self._by_address[address]


class OpenConnection(Protocol):
    """The part of `ClientConnection` that the server and requests use."""

    address: str  # IP address of the client
    # None if more data may be sent now. Otherwise an event that is set as soon as more data may be sent.
    writable: asyncio.Event | None
    service: "Service"  # state that all connections of the server share

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send `data` to the client. `last` is True for the end of a response."""
        ...

    def body_consumed(self, size: int) -> None:
        """Notify the connection that the application has received `size` bytes of a body."""
        ...

    def response_done(self, *, keep_alive: bool) -> None:
        """Notify the connection that the response to its oldest request is complete."""
        ...

    def end(self) -> None:
        """Send buffered data, let the client finish its request body, then close."""
        ...

    def stop(self) -> None:
        """Close the connection after the responses to its requests."""
        ...

    def close(self) -> None:
        """Send buffered data, then close the connection."""
        ...


@dataclass
class Service:
    """An ASGI application with its open connections and running requests."""

    app: ASGIApp  # the ASGI application
    keep_alive_secs: float  # seconds after which an idle connection is closed
    bodies: BodyBudget = field(default_factory=BodyBudget)  # memory limit for request bodies
    connections: set[OpenConnection] = field(default_factory=set)
    idle: IdleConnections = field(default_factory=IdleConnections)  # connections that wait for a request
    # Asyncio tasks of requests. A task may still run after its connection has closed.
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    stopping: bool = False  # True during shutdown. Each connection then closes after its current requests.
    # event that is set when the last connection closes during shutdown
    all_gone: asyncio.Event = field(default_factory=asyncio.Event)
    _date: bytes = b""
    _second: int = 0

    def is_stopping(self) -> bool:
        """Return whether the server is shutting down."""
        return self.stopping

    def date(self) -> bytes:
        """Return the `date` header line, with its line break, for the current time."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._date = b"date: %s\r\n" % formatdate(second, usegmt=True).encode()
        return self._date

    def remove(self, connection: OpenConnection) -> None:
        """Unregister a connection that has been closed."""
        self.connections.discard(connection)
        self.idle.remove(connection)
        if self.stopping and not self.connections:
            self.all_gone.set()
