"""State that the connections of one listener share."""

import asyncio
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Protocol

from starlette.types import ASGIApp

from helexa.http.body_budget import BodyBudget


class OpenConnection(Protocol):
    """A connection's interface for listener and acceptor.

    Attributes:
        address: the client's host.
    """

    address: str

    def stop(self) -> None:
        """Close the connection after the responses in progress."""
        ...

    def evict(self) -> bool:
        """Close the connection to make room for another; return False if a response is not fully sent."""
        ...

    def close(self) -> None:
        """Send buffered data, then close the connection."""
        ...


@dataclass
class Service:
    """An application and its current connections and requests.

    Attributes:
        app: the ASGI application.
        keep_alive_secs: seconds an idle connection stays open.
        bodies: memory budget of request bodies.
        connections: the open connections.
        idle: connections without a request, longest idle first. The value is the time at which the connection became
            idle, by the event loop's clock.
        tasks: tasks of requests. A connection may close before its last task ends.
        stopping: True during shutdown: each connection closes after its current requests.
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

    def date(self) -> bytes:
        """Return the `date` header line for a response that begins now."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._date = b"date: %s\r\n" % formatdate(second, usegmt=True).encode()
        return self._date

    def remove(self, connection: OpenConnection) -> None:
        """Remove a closed connection."""
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        if self.stopping and not self.connections:
            self.all_gone.set()
