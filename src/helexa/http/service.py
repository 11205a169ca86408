"""What the connections of one listener share."""

import asyncio
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Protocol

from starlette.types import ASGIApp

from helexa.http.body_budget import BodyBudget


class OpenConnection(Protocol):
    """What a service's owners do with a connection.

    Attributes:
        address: the client's host.
    """

    address: str

    def stop(self) -> None:
        """End after the responses that are under way."""
        ...

    def evict(self) -> bool:
        """Close the connection to make room for another; return False if a response is not sent to its end."""
        ...

    def close(self) -> None:
        """Send what is written, and end."""
        ...


@dataclass
class Service:
    """An application, and what is under way in it.

    Attributes:
        keep_alive_secs: that an idle connection stays open.
        bodies: the memory for request bodies.
        connections: those that are open.
        idle: connections without a request, and since when (seconds of the event loop's clock), the longest idle first.
        tasks: those of requests; a connection may be gone before its last one has ended.
        stopping: no connection is kept for a further request.
        all_gone: set when the last connection goes while it is stopping.
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
        """The `date` header of an answer that begins now, as a line."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._date = b"date: %s\r\n" % formatdate(second, usegmt=True).encode()
        return self._date

    def leave(self, connection: OpenConnection) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        if self.stopping and not self.connections:
            self.all_gone.set()
