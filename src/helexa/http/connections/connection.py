"""A client's HTTP/1.1 connection with limits against misbehaving clients."""

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
from helexa.http.connections.request_parser import PIECE_BYTES, RequestParser
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

    The strict parser (llhttp) rejects requests with an ambiguous end. Further rules:

    - A head must arrive within `HEAD_SECS`, and has at most `max_head_bytes` and `max_headers`. The same limits apply
      to trailers and chunk extensions.
    - A client that reads nothing of a response for `TAKE_SECS` is disconnected, because a node works for it meanwhile.
    - HTTP/1.1 requests have exactly one `Host`. A body has a length or is `chunked`, without further encoding.
    - The authority of an absolute-form target replaces `Host` in the headers for the application.
    - Requests are answered in order. While too many requests or body bytes are queued, reading pauses. Data after a
      request that ends the connection is dropped.
    - All queued requests of the connection are notified if the client disconnects, even while reading is paused. A
      client that closes its sending side counts as disconnected, because the two cases look the same.
    - If the client still sends a body when its response ends the connection, the server reads for up to `LINGER_SECS`
      more: many clients lose a response if they cannot send.
    - Trailers are dropped.
    - `Upgrade` headers, which some HTTP clients add to each first request, are ignored. The parser would take the data
      after them for the other protocol and lose the request's body.
    - Invalid requests get an error response in the usual envelope.
    - A connection over the listener's limits gets a 503 for its first request, and has `REJECTED_SECS` to send its
      head.

    Args:
        service: state shared by all connections.
        loop: the event loop.
        address: the client's host.
        released: called once the connection is closed.
        rejected: the connection is over the listener's limits.

    Attributes:
        address: the client's host.
        room: set once the client has read enough of the sent data; None while more may be sent.
        service: state shared by all connections.
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
        self._intake = RequestParser(self)
        self._alarm = Alarm(loop, self.close)
        self._patience = Alarm(loop, self._lose_patience)
        self._lookout = Alarm(loop, self._look)
        self._awaits_head = True
        self._deaf = False  # received data is dropped
        self._held_bytes = 0
        self._untaken_bytes = 0
        self._paused = False
        self._unread: bytes | memoryview = b""  # received data that waits until the application has read more
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._call: Call | None = None  # the request whose body is arriving
        # requests without a complete response: the first one runs, the others wait
        self._calls: deque[tuple[Call, Scope]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle a new connection: wait for its first head."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the same interface
        self._server = transport.get_extra_info("sockname")[:2]
        self._client = (transport.get_extra_info("peername") or ("-", 0))[:2]  # None if the client is already gone
        self.service.connections.add(self)
        self._alarm.set(REJECTED_SECS if self._rejected else HEAD_SECS)
        self._mark_idle()
        if self.service.stopping:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        for alarm in (self._alarm, self._patience, self._lookout):
            alarm.stop()
        self.resume_writing()
        self._lose()
        self._unsent.clear()
        self.service.leave(self)
        self._intake.close()
        self._released()

    def eof_received(self) -> None:
        """Close the connection: the client sends no more data and counts as disconnected."""
        self.close()

    def pause_writing(self) -> None:
        """Pause sending: the client reads slower than the response is produced."""
        self.room = asyncio.Event()
        self._be_patient()

    def resume_writing(self) -> None:
        """Resume sending."""
        if not self._transport.is_closing():
            self._patience.clear()
        if self.room is not None:
            self.room.set()
            self.room = None

    def data_received(self, data: bytes) -> None:
        """Parse received data. Invalid data ends the connection."""
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
        """Start a request, or queue it behind earlier requests.

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
            headers = [(b"host", authority), *(pair for pair in headers if pair[0] != b"host")]
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
        """Hold a piece of a body for the application."""
        if self._call is not None:
            self._held_bytes += self._call.feed(body)
            if self._held_bytes > _MAX_HELD_BYTES:
                self._regulate()

    def take_end(self, *, keeps: bool) -> None:
        """Handle the end of a request."""
        call, self._call = self._call, None
        if call is None:
            return
        call.feed_end()
        if not (call.keep_alive and keeps):  # a trailer may have changed `keeps`
            call.keep_alive = False
            self._deaf = True
            if call.complete:
                self.close()

    def write(self, data: bytes) -> None:
        """Send data, joined with all other data of the same event loop iteration.

        Head and body of a response then cost one system call.
        """
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > _MAX_HELD_BYTES:
            self._flush()  # only the transport knows when its buffer is full

    def taken(self, size: int) -> None:
        """Record that the application has taken `size` bytes of a body."""
        self._held_bytes -= size
        if self._paused:
            self._regulate()

    def answered(self, call: Call) -> None:
        """Handle a complete response: start the next queued request, or wait for one."""
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
        """Send buffered data and close the connection. If the client still sends a body, read for a while before."""
        if self._call is None:
            self.close()
        else:
            self._linger()

    def close(self) -> None:
        """Send buffered data, then close the connection."""
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
        """Close the connection to make room for another; return False if a response is not fully sent."""
        if self._transport.get_write_buffer_size():
            return False
        self.close()
        return True

    def stop(self) -> None:
        """Close the connection after the responses in progress."""
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
        """Pause or resume reading, so that only a limited amount of data waits for the application."""
        full = not self._deaf and (self._held_bytes > _MAX_HELD_BYTES or len(self._calls) > _MAX_WAITING)
        if full == self._paused or self._transport.is_closing():
            return
        self._paused = full
        if full:
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
        """Parse data until enough requests wait: a large piece may hold thousands of small requests, or one body."""
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
        """Send an error response for invalid data, and stop parsing the connection."""
        if self._deaf:
            return
        log.log(logging.DEBUG if self._rejected else logging.INFO, "%s: %s", self.address, error)
        if not self._calls or not self._calls[0][0].started:
            self.write(refusal(error))
        self._linger()
