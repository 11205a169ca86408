"""The state that all connections of one server share."""

import asyncio
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Protocol

from starlette.types import ASGIApp

from helexa.http.body_budget import BodyBudget


class OpenConnection(Protocol):
    """The methods of a connection that the server uses to close it.

    Attributes:
        address: IP address of the client.
    """

    address: str

    def stop(self) -> None:
        """Close the connection if it has no requests. Otherwise it closes after their responses."""
        ...

    def evict(self) -> bool:
        """Close the idle connection to make room for another one.

        Returns:
            False if a response has not been fully sent yet. The connection then stays open.
        """
        ...

    def close(self) -> None:
        """Send buffered data, then close the connection."""
        ...


@dataclass
class Service:
    """An ASGI application with its open connections and running requests.

    Attributes:
        app: the ASGI application.
        keep_alive_secs: seconds after which an idle connection is closed.
        bodies: memory limit for request bodies.
        connections: the open connections.
        idle: connections without a request, longest idle first. The dict maps each connection to the time at which it
            became idle, on the event loop's clock.
        tasks: asyncio tasks of requests. A task may still run after its connection has closed.
        stopping: True during shutdown. Each connection then closes after its current requests.
        all_gone: event that is set when the last connection closes during shutdown.
    """

    app: ASGIApp
    keep_alive_secs: float
    bodies: BodyBudget = field(default_factory=BodyBudget)
    connections: set[OpenConnection] = field(default_factory=set)
    idle: dict[OpenConnection, float] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    stopping: bool = False
    all_gone: asyncio.Event = field(default_factory=asyncio.Event)
    _date: bytes = b""
    _second: int = 0

    def is_stopping(self) -> bool:
        """Return whether the server is shutting down."""
        return self.stopping

    def date(self) -> bytes:
        """Return the line of a response's head that contains the `date` header with the current time."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._date = b"date: %s\r\n" % formatdate(second, usegmt=True).encode()
        return self._date

    def remove(self, connection: OpenConnection) -> None:
        """Unregister a connection that has been closed."""
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        if self.stopping and not self.connections:
            self.all_gone.set()
