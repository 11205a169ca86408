"""An HTTP/1.1 connection of a client, with limits against misbehaving clients."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

from starlette.types import Scope

from helexa.core.errors import ApiError, overloaded
from helexa.http.connections.client_disconnect import DisconnectGuard, is_gone
from helexa.http.connections.deadline_timer import DeadlineTimer
from helexa.http.connections.request_cycle import INTERIM, RequestCycle
from helexa.http.connections.request_head import Framing, Headers, error_response, target
from helexa.http.connections.request_parser import CHUNK_BYTES, RequestParser
from helexa.http.service import Service

log = logging.getLogger(__name__)

HEAD_SECS = 20.0
STALL_SECS = 300.0
LINGER_SECS = 5.0
REJECTED_SECS = 1.0

_DISCONNECT_POLL_SECS = 0.05
_RETRY_SECS = 1
_MAX_BUFFERED_BYTES = 64 << 10
_MAX_WAITING = 16
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class Connection(asyncio.Protocol):
    """One client connection, as an asyncio protocol.

    The strict parser (llhttp) rejects requests with ambiguous framing. Further rules:

    - A head must arrive within `HEAD_SECS`. It may have at most `max_head_bytes` bytes and `max_headers` headers. The
      same limits apply to trailers and chunk extensions.
    - A client that reads nothing of a response for `STALL_SECS` is disconnected, because its request occupies a node.
    - HTTP/1.1 requests must have exactly one `Host` header. The only allowed transfer encoding is `chunked`.
    - If the request target is an absolute URL, its host and port replace the `Host` header for the application.
    - Responses are sent in the order of the requests. While too many requests or body bytes are buffered, the server
      stops reading. Data after a request with `connection: close` is dropped.
    - If the client disconnects, all requests of the connection are notified, even while the server does not read. A
      client that closes only its sending side counts as disconnected, because the server cannot tell the difference.
    - If the client is still sending a body when the server closes the connection, the server continues to read for up
      to `LINGER_SECS`. Many clients do not read the response if their sending fails.
    - Trailers are dropped.
    - `Upgrade` headers are ignored. Otherwise the parser would treat the request body as data of another protocol. Some
      HTTP clients send such a header with their first request.
    - Invalid requests receive an error response in the API's error format.
    - A connection that exceeds the server's limits receives a 503 for its first request. It must send the head of the
      request within `REJECTED_SECS`.

    Args:
        service: state that all connections of the server share.
        loop: the event loop.
        address: IP address of the client.
        released: function to call when the connection is closed.
        rejected: True if the connection exceeds the server's limits.

    Attributes:
        address: IP address of the client.
        writable: None if more data may be sent now. Otherwise an event that is set as soon as more data may be sent.
        service: state that all connections of the server share.
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
        self.writable: asyncio.Event | None = None
        self._loop = loop
        self._parser = RequestParser(self)
        self._timer = DeadlineTimer(loop, self.close)
        self._stall_timer = DeadlineTimer(loop, self._check_stall)
        self._disconnect_timer = DeadlineTimer(loop, self._check_disconnect)
        self._awaits_head = True
        self._ignores_input = False  # if True, received data is dropped
        self._queued_bytes = 0
        self._stalled_bytes = 0
        self._paused = False
        self._unread: bytes | memoryview = b""  # received data that waits until the application has read more
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._cycle: RequestCycle | None = None  # the request whose body is arriving
        # requests without a complete response: the first one runs, the others wait
        self._cycles: deque[tuple[RequestCycle, Scope]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, and set the time limit for the head of its first request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the same interface
        self._server = transport.get_extra_info("sockname")[:2]
        self._client = (transport.get_extra_info("peername") or ("-", 0))[:2]  # None if the client is already gone
        self.service.connections.add(self)
        self._timer.set(REJECTED_SECS if self._rejected else HEAD_SECS)
        self._mark_idle()
        if self.service.stopping:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify all requests that the client has disconnected, and release the connection's resources."""
        for timer in (self._timer, self._stall_timer, self._disconnect_timer):
            timer.stop()
        self.resume_writing()
        self._drop_calls()
        self._unsent.clear()
        self.service.remove(self)
        self._parser.close()
        self._released()

    def eof_received(self) -> None:
        """Close the connection, because a client that has closed its sending side counts as disconnected."""
        self.close()

    def pause_writing(self) -> None:
        """Make applications wait before they send more data, because the client reads too slowly."""
        self.writable = asyncio.Event()
        self._watch_stall()

    def resume_writing(self) -> None:
        """Let applications send data again after `pause_writing`."""
        if not self._transport.is_closing():
            self._stall_timer.clear()
        if self.writable is not None:
            self.writable.set()
            self.writable = None

    def data_received(self, data: bytes) -> None:
        """Parse received data, or buffer it if reading is stopped."""
        if self._paused:
            self._unread = b"".join((self._unread, data))
        elif len(data) <= CHUNK_BYTES:
            self._parse(data)
        else:
            self._parse_slices(memoryview(data))

    def handle_head(
        self,
        method: bytes,
        url: bytes,
        version: str,
        headers: Headers,
        framing: Framing,
        *,
        keep_alive: bool,
    ) -> None:
        """Start the request that has this head, or queue it if earlier requests have no complete response yet.

        Raises:
            ApiError: status 503, if the connection exceeds the server's limits.
        """
        if self._ignores_input:
            return
        if self._rejected:
            raise overloaded("too many connections are open; try again", _RETRY_SECS)
        self._awaits_head = False
        self._timer.clear()
        self.service.idle.pop(self, None)
        raw_path, query, authority = target(url)
        if authority is not None:
            headers = [(b"host", authority), *(pair for pair in headers if pair[0] != b"host")]
        path = raw_path.decode("ascii")
        disconnect = DisconnectGuard()
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
            "extensions": {DisconnectGuard.NAME: disconnect},
        }
        self._cycle = cycle = RequestCycle(
            self,
            disconnect,
            framing,
            is_head=method == b"HEAD",
            speaks_1_1=version == "1.1",
            keep_alive=keep_alive and version == "1.1" and not self.service.stopping,
        )
        scope["extensions"][INTERIM] = cycle.send_interim
        self._cycles.append((cycle, scope))
        if len(self._cycles) == 1:
            self._begin(cycle, scope)
        else:
            self._update_reading()

    def handle_body(self, body: bytes) -> None:
        """Buffer the next bytes of the current request's body for the application."""
        if self._cycle is not None:
            self._queued_bytes += self._cycle.feed(body)
            if self._queued_bytes > _MAX_BUFFERED_BYTES:
                self._update_reading()

    def handle_end(self, *, keep_alive: bool) -> None:
        """Record that the current request's body is complete.

        If no other request may follow on this connection, drop further data.
        """
        cycle, self._cycle = self._cycle, None
        if cycle is None:
            return
        cycle.feed_end()
        if not (cycle.keep_alive and keep_alive):  # a trailer may have changed `keep_alive`
            cycle.keep_alive = False
            self._ignores_input = True
            if cycle.complete:
                self.close()

    def write(self, data: bytes) -> None:
        """Queue `data` to be sent. One system call sends all data of one iteration of the event loop."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > _MAX_BUFFERED_BYTES:
            self._flush()  # only the transport knows when its buffer is full

    def body_consumed(self, size: int) -> None:
        """Resume reading if the application has received enough of the buffered body. `size` is the number of bytes."""
        self._queued_bytes -= size
        if self._paused:
            self._update_reading()

    def response_done(self, cycle: RequestCycle) -> None:
        """Start the next queued request after a complete response.

        If no request is queued, wait for the next request or close the connection.
        """
        self._cycles.popleft()
        if not cycle.keep_alive or (self.service.stopping and not self._cycles):
            self.end()
        elif self._cycles:
            self._begin(*self._cycles[0])
        else:
            self._awaits_head = self._parser.in_head
            self._timer.set(HEAD_SECS if self._parser.in_head else self.service.keep_alive_secs)
            self._mark_idle()
        if self._paused:
            self._update_reading()

    def end(self) -> None:
        """Send buffered data and close the connection.

        If the client is still sending a body, read and drop it for up to `LINGER_SECS` first.
        """
        if self._cycle is None:
            self.close()
        else:
            self._linger()

    def close(self) -> None:
        """Send buffered data, then close the connection."""
        self._ignores_input = True
        self.service.idle.pop(self, None)
        self._drop_calls()
        self._flush()
        self._timer.clear()
        self._disconnect_timer.clear()
        if not self._transport.is_closing():
            self._watch_stall()
            self._transport.close()

    def evict(self) -> bool:
        """Close the idle connection to make room for another one.

        Returns:
            False if a response has not been fully sent yet. The connection then stays open.
        """
        if self._transport.get_write_buffer_size():
            return False
        self.close()
        return True

    def stop(self) -> None:
        """Close the connection if it has no requests. Otherwise it closes after their responses."""
        if not self._cycles:
            self.close()

    def _flush(self) -> None:
        if self._unsent:
            data = b"".join(self._unsent)
            self._unsent.clear()
            self._unsent_bytes = 0
            self._transport.write(data)

    def _begin(self, cycle: RequestCycle, scope: Scope) -> None:
        task = self._loop.create_task(cycle.run(self.service.app, scope))
        cycle.disconnect.task = task
        self.service.tasks.add(task)

    def _mark_idle(self) -> None:
        if not self._rejected:
            self.service.idle[self] = self._loop.time()

    def _drop_calls(self) -> None:
        for cycle, _ in self._cycles:
            cycle.client_gone()
        self._cycles.clear()
        self._cycle = None
        self._unread = b""

    def _linger(self) -> None:
        self._ignores_input = True
        self._drop_calls()
        self._flush()
        if not self._transport.is_closing():
            self._timer.set(REJECTED_SECS if self._rejected else LINGER_SECS)
            self._transport.write_eof()
            self._update_reading()

    def _update_reading(self) -> None:
        """Stop or resume reading from the client, depending on how many requests and body bytes are buffered."""
        full = not self._ignores_input and (
            self._queued_bytes > _MAX_BUFFERED_BYTES or len(self._cycles) > _MAX_WAITING
        )
        if full == self._paused or self._transport.is_closing():
            return
        self._paused = full
        if full:
            self._transport.pause_reading()
            self._disconnect_timer.set(_DISCONNECT_POLL_SECS)
            return
        self._disconnect_timer.clear()
        self._parse_slices(memoryview(self._unread))
        if not self._paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def _check_disconnect(self) -> None:
        if is_gone(self._transport.get_extra_info("socket").fileno()):
            self.close()
        else:
            self._disconnect_timer.set(_DISCONNECT_POLL_SECS)

    def _watch_stall(self) -> None:
        self._stalled_bytes = self._transport.get_write_buffer_size()
        self._stall_timer.set(STALL_SECS)

    def _check_stall(self) -> None:
        if self._transport.get_write_buffer_size() < self._stalled_bytes:
            self._watch_stall()
        else:
            self._transport.abort()

    def _parse_slices(self, data: memoryview) -> None:
        """Parse data in slices, because one read may contain thousands of small requests.

        When too many requests are queued, stop and keep the unparsed data for later.
        """
        while data and len(self._cycles) <= _MAX_WAITING and not self._ignores_input:
            size = CHUNK_BYTES if self._cycle is None else max(CHUNK_BYTES, self._cycle.missing_bytes)
            self._parse(data[:size])
            data = data[size:]
        self._unread = b"" if self._ignores_input else data

    def _parse(self, data: bytes | memoryview) -> None:
        if self._ignores_input:
            return
        try:
            self._parser.feed(data)
        except ApiError as error:
            self._reject(error)
        else:
            if not self._cycles and not self._awaits_head:
                self._awaits_head = True
                self._timer.set(HEAD_SECS)

    def _reject(self, error: ApiError) -> None:
        """Send an error response for an invalid request, drop further data, and close the connection."""
        if self._ignores_input:
            return
        log.log(logging.DEBUG if self._rejected else logging.INFO, "%s: %s", self.address, error)
        if not self._cycles or not self._cycles[0][0].started:
            self.write(error_response(error))
        self._linger()
