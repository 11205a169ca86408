"""A client's connection, with what a server on a network must not take from strangers."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

from starlette.types import Scope

from helexa.core.errors import ApiError, overloaded
from helexa.http.connections.call import INTERIM, Call
from helexa.http.connections.client_disconnect import HangUp, is_gone
from helexa.http.connections.deadline import Alarm
from helexa.http.connections.request_head import Framing, Headers, refusal, target
from helexa.http.connections.request_parser import PIECE_BYTES, Intake
from helexa.http.service import Service

log = logging.getLogger(__name__)

HEAD_SECS = 20.0
TAKE_SECS = 300.0
LINGER_SECS = 5.0
REJECTED_SECS = 1.0

_LOOK_SECS = 0.05
_RETRY_SECS = 1
_MAX_HELD_BYTES = 64 << 10
_MAX_WAITING = 16
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class Connection(asyncio.Protocol):
    """One connection.

    Its parser (llhttp, strict) refuses what is ambiguous about where a request ends. Added to that:

    - A head must be there within `HEAD_SECS`, and has at most `max_head_bytes` and `max_headers`. As much may come that
      is neither a head's end nor a body: trailers, extensions of chunks.
    - Who takes nothing of an answer for `TAKE_SECS` is cut off: a node works for them meanwhile.
    - HTTP/1.1 has exactly one `Host`; a body comes as it is or `chunked`, and is never coded further.
    - The authority of an absolute-form target replaces `Host` in the headers that the application sees.
    - Requests are answered in their order. While many of them, or much of a body, wait to be taken, no more is read.
      What comes behind a request that ends the connection is dropped.
    - Who hangs up is noticed by all requests that wait on the connection, not by the last one only, and also while
      nothing is read. Who closes its sending side is gone: nothing tells that from closing both.
    - Who still sends a body when its answer ends the connection is heard for up to `LINGER_SECS` more: a client loses
      an answer with the connection that it cannot send to.
    - Trailers are dropped: they are no headers.
    - A wish for another protocol (`Upgrade`, which some HTTP clients add to every first request) is ignored. The
      parser takes what follows it for that protocol, and would lose the request's body.
    - What cannot be read is refused in the envelope of all errors.
    - A connection over the listener's limits gets a 503 to its first request, and `REJECTED_SECS` to send its head.

    Args:
        address: the client's host.
        released: called once the connection is gone.
        rejected: the connection is over the listener's limits.

    Attributes:
        address: the client's host.
        room: set once the client took enough of what is written; None while more may be.
        service: what all connections share.
    """

    max_head_bytes = 32 << 10
    max_headers = 100

    _transport: asyncio.Transport

    def __init__(
        self,
        service: Service,
        loop: asyncio.AbstractEventLoop,
        address: str,
        released: Callable[[], None],
        *,
        rejected: bool = False,
    ) -> None:
        self.service = service
        self.address = address
        self._released = released
        self._rejected = rejected
        self.room: asyncio.Event | None = None
        self._loop = loop
        self._intake = Intake(self)
        self._alarm = Alarm(loop, self.close)
        self._patience = Alarm(loop, self._lose_patience)
        self._lookout = Alarm(loop, self._look)
        self._awaits_head = True
        self._deaf = False  # what still comes is dropped
        self._held_bytes = 0
        self._untaken_bytes = 0
        self._paused = False
        self._unread: bytes | memoryview = b""  # what came and waits until more is taken
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._call: Call | None = None  # the one whose body comes
        self._calls: deque[tuple[Call, Scope]] = deque()  # those without a complete answer: one runs, the others wait

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there; its first head is awaited."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._server = transport.get_extra_info("sockname")[:2]
        self._client = (transport.get_extra_info("peername") or ("-", 0))[:2]  # None if it is gone already
        self.service.connections.add(self)
        self._alarm.set(REJECTED_SECS if self._rejected else HEAD_SECS)
        self._mark_idle()
        if self.service.stopping:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        for alarm in (self._alarm, self._patience, self._lookout):
            alarm.stop()
        self.resume_writing()
        self._lose()
        self._unsent.clear()
        self.service.leave(self)
        self._intake.close()
        self._released()

    def eof_received(self) -> None:
        """The client sends no more, so it is gone."""
        self.close()

    def pause_writing(self) -> None:
        """The client is slower than the answer."""
        self.room = asyncio.Event()
        self._be_patient()

    def resume_writing(self) -> None:
        """It has caught up."""
        if not self._transport.is_closing():
            self._patience.clear()
        if self.room is not None:
            self.room.set()
            self.room = None

    def data_received(self, data: bytes) -> None:
        """Parse what came; what cannot be parsed ends the connection."""
        if self._paused:
            self._unread = b"".join((self._unread, data))
        elif len(data) <= PIECE_BYTES:
            self._parse(data)
        else:
            self._parse_slices(memoryview(data))

    def take_head(
        self,
        method: bytes,
        url: bytes,
        version: str,
        headers: Headers,
        framing: Framing,
        *,
        keeps: bool,
    ) -> None:
        """Start a request, or let it wait for the answers before its own.

        Raises:
            ApiError: 503: the connection is over the listener's limits.
        """
        if self._deaf:
            return
        if self._rejected:
            raise overloaded("too many connections are open; try again", _RETRY_SECS)
        self._awaits_head = False
        self._alarm.clear()
        self.service.idle.pop(self, None)
        raw_path, query, authority = target(url)
        if authority is not None:
            headers = [(b"host", authority), *(header for header in headers if header[0] != b"host")]
        path = raw_path.decode("ascii")
        hang_up = HangUp()
        scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": method.decode("ascii"),
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": self._client,
            "server": self._server,
            "extensions": {HangUp.NAME: hang_up},
        }
        self._call = call = Call(
            self,
            hang_up,
            framing,
            is_head=method == b"HEAD",
            speaks_1_1=version == "1.1",
            keep_alive=keeps and version == "1.1" and not self.service.stopping,
        )
        scope["extensions"][INTERIM] = call.send_interim
        self._calls.append((call, scope))
        if len(self._calls) == 1:
            self._begin(call, scope)
        else:
            self._regulate()

    def take_body(self, body: bytes) -> None:
        """Hold some of a body."""
        if self._call is not None:
            self._held_bytes += self._call.feed(body)
            if self._held_bytes > _MAX_HELD_BYTES:
                self._regulate()

    def take_end(self, *, keeps: bool) -> None:
        """A request is complete."""
        call, self._call = self._call, None
        if call is None:
            return
        call.feed_end()
        if not (call.keep_alive and keeps):  # a trailer may have said so
            call.keep_alive = False
            self._deaf = True
            if call.complete:
                self.close()

    def write(self, data: bytes) -> None:
        """Send these bytes, in one piece with what else is written within this turn of the event loop: head and body of
        an answer then cost one system call."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > _MAX_HELD_BYTES:
            self._flush()  # only the transport knows when there is no more room

    def taken(self, size: int) -> None:
        """So many bytes of a body are no longer held."""
        self._held_bytes -= size
        if self._paused:
            self._regulate()

    def answered(self, call: Call) -> None:
        """The answer that was the turn of is complete."""
        self._calls.popleft()
        if not call.keep_alive or (self.service.stopping and not self._calls):
            self.end()
        elif self._calls:
            self._begin(*self._calls[0])
        else:
            self._awaits_head = self._intake.in_head
            self._alarm.set(HEAD_SECS if self._intake.in_head else self.service.keep_alive_secs)
            self._mark_idle()
        if self._paused:
            self._regulate()

    def end(self) -> None:
        """Send what is written, and end; a client that still sends a body is heard out before."""
        if self._call is None:
            self.close()
        else:
            self._linger()

    def close(self) -> None:
        """Send what is written, and end."""
        self._deaf = True
        self.service.idle.pop(self, None)
        self._lose()
        self._flush()
        self._alarm.clear()
        self._lookout.clear()
        if not self._transport.is_closing():
            self._be_patient()
            self._transport.close()

    def evict(self) -> bool:
        """Close the connection to make room for another; return False if an answer is not sent to its end."""
        if self._transport.get_write_buffer_size():
            return False
        self.close()
        return True

    def stop(self) -> None:
        """End, after the answers that are under way."""
        if not self._calls:
            self.close()

    def _flush(self) -> None:
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self._unsent_bytes = 0
            self._transport.write(data)

    def _begin(self, call: Call, scope: Scope) -> None:
        task = self._loop.create_task(call.run(self.service.app, scope))
        call.hang_up.task = task
        self.service.tasks.add(task)

    def _mark_idle(self) -> None:
        if not self._rejected:
            self.service.idle[self] = self._loop.time()

    def _lose(self) -> None:
        for call, _ in self._calls:
            call.lose()
        self._calls.clear()
        self._call = None
        self._unread = b""

    def _linger(self) -> None:
        self._deaf = True
        self._lose()
        self._flush()
        if not self._transport.is_closing():
            self._alarm.set(REJECTED_SECS if self._rejected else LINGER_SECS)
            self._transport.write_eof()
            self._regulate()

    def _regulate(self) -> None:
        """Read no more than the application takes."""
        over_limit = not self._deaf and (self._held_bytes > _MAX_HELD_BYTES or len(self._calls) > _MAX_WAITING)
        if over_limit == self._paused or self._transport.is_closing():
            return
        self._paused = over_limit
        if over_limit:
            self._transport.pause_reading()
            self._lookout.set(_LOOK_SECS)
            return
        self._lookout.clear()
        self._parse_slices(memoryview(self._unread))
        if not self._paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def _look(self) -> None:
        if is_gone(self._transport.get_extra_info("socket").fileno()):
            self.close()
        else:
            self._lookout.set(_LOOK_SECS)

    def _be_patient(self) -> None:
        self._untaken_bytes = self._transport.get_write_buffer_size()
        self._patience.set(TAKE_SECS)

    def _lose_patience(self) -> None:
        if self._transport.get_write_buffer_size() < self._untaken_bytes:
            self._be_patient()
        else:
            self._transport.abort()

    def _parse_slices(self, data: memoryview) -> None:
        """Parse as much as may wait: a large piece holds thousands of small requests, unless it is one body."""
        while data and len(self._calls) <= _MAX_WAITING and not self._deaf:
            size = PIECE_BYTES if self._call is None else max(PIECE_BYTES, self._call.missing_bytes)
            self._parse(data[:size])
            data = data[size:]
        self._unread = b"" if self._deaf else data

    def _parse(self, data: bytes | memoryview) -> None:
        if self._deaf:
            return
        try:
            self._intake.feed(data)
        except ApiError as error:
            self._refuse(error)
        else:
            if not self._calls and not self._awaits_head:
                self._awaits_head = True
                self._alarm.set(HEAD_SECS)

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be a request, and hear no more from here."""
        if self._deaf:
            return
        log.log(logging.DEBUG if self._rejected else logging.INFO, "%s: %s", self.address, error)
        if not self._calls or not self._calls[0][0].started:
            self.write(refusal(error))
        self._linger()
