"""An HTTP/1.1 connection of a client, with limits against misbehaving clients."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

from starlette.types import Scope

from helexa.core.errors import ApiError, overloaded
from helexa.core.logs import quoted
from helexa.http.headers import Headers
from helexa.http.idle_connections import DeadlineTimer, has_input, is_gone
from helexa.http.request_cycle_and_disconnects import INTERIM, STOPPING, DisconnectGuard, RequestCycle
from helexa.http.request_parser import CHUNK_BYTES, Framing, RequestParser, body_decoder, error_response, target
from helexa.http.service_and_memory_budget import Service

log = logging.getLogger(__name__)

HEAD_SECS = 20.0
STALL_SECS = 300.0
LINGER_SECS = 5.0
REJECTED_SECS = 1.0
LATE_SECS = 0.5

_DISCONNECT_POLL_SECS = 0.05
_RETRY_SECS = 1
_MAX_BUFFERED_BYTES = 64 << 10
_MAX_WAITING = 16
_ASGI = {"version": "3.0", "spec_version": "2.3"}


class ClientConnection(RequestParser, asyncio.Protocol):
    """One client connection, with limits against misbehaving clients.

    - A head must arrive within `HEAD_SECS`.
    - A client that reads nothing of a response for `STALL_SECS` is disconnected, because its request occupies a node.
    - If the request target is an absolute URL, its host and port replace the `Host` header for the application.
    - Responses are sent in the order of the requests. While too many requests or body bytes are buffered, the server
      stops reading. Data after a request with `connection: close` is dropped.
    - If the client disconnects, all requests of the connection are notified, on Linux even while the server does not
      read. A client that closes only its sending side counts as disconnected, because the server cannot tell the
      difference.
    - If the client is still sending a body when the server closes the connection, the server continues to read for up
      to `LINGER_SECS`. Many clients do not read the response if their sending fails.
    - Bodies with the `Content-Encoding` gzip, deflate or zstd are decoded, and the application does not see the header.
    - Invalid requests receive an error response in the API's error format.
    - A connection that exceeds the server's limits receives a 503 for its first request. It must send the head of the
      request within `REJECTED_SECS`.

    Args:
        service: state that all connections of the server share.
        released: function to call when the connection is closed.
        rejected: True if the connection exceeds the server's limits.
    """

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
        super().__init__()
        self.service = service  # state that all connections of the server share
        self.address = address  # IP address of the client
        self._released = released
        self._rejected = rejected
        # None if more data may be sent now. Otherwise an event that is set as soon as more data may be sent.
        self.writable: asyncio.Event | None = None
        self._loop = loop
        self._timer = DeadlineTimer(loop, self._run_out_of_time)
        self._stall_timer = DeadlineTimer(loop, self._check_stall)
        self._disconnect_timer = DeadlineTimer(loop, self._check_disconnect)
        self._awaits_head = True
        self._may_be_late = True
        self._ignores_input = False  # if True, received data is dropped
        self._queued_bytes = 0
        self._stalled_bytes = 0
        self._paused = False
        self._unread: bytes | memoryview = b""  # received data that is parsed later, because too much is buffered now
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._cycle: RequestCycle | None = None  # the request whose body is arriving
        # requests without a complete response: the first one runs, the others wait
        self._cycles: deque[tuple[RequestCycle, Scope]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection, and limit the time for the head of its first request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the same interface
        self._server = transport.get_extra_info("sockname")[:2]
        # `peername` is None if the client has already disconnected.
        self._client = (transport.get_extra_info("peername") or ("-", 0))[:2]
        self.service.connections.add(self)
        self._timer.set(REJECTED_SECS if self._rejected else HEAD_SECS)
        self._mark_idle()
        if self.service.stopping:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify all requests of the disconnect, and release the resources."""
        for timer in (self._timer, self._stall_timer, self._disconnect_timer):
            timer.stop()
        self.resume_writing()
        self._drop_calls()
        self._unsent.clear()
        self.service.remove(self)
        self.release_parser()
        self._released()

    def eof_received(self) -> None:
        """Close the connection. Half-closed clients count as disconnected."""
        self.close()

    def pause_writing(self) -> None:
        """Make applications wait before they send more data."""
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
            self._receive(data)
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
        """Start a request, or queue it behind requests without a complete response.

        Raises:
            ApiError: status 503, if the connection exceeds the server's limits. 400, if the request target is invalid.
        """
        if self._ignores_input:
            return
        if self._rejected:
            raise overloaded(
                f"the server is at its limit of open connections; close connections, or try again in {_RETRY_SECS} s",
                _RETRY_SECS,
            )
        self._awaits_head = False
        self._timer.clear()
        self.service.idle.remove(self)
        raw_path, query, authority = target(url)
        if authority is not None:
            headers = [(b"host", authority), *(pair for pair in headers if pair[0] != b"host")]
        path = raw_path.decode("ascii")
        decoder, headers = body_decoder(headers)
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
            "extensions": {DisconnectGuard.NAME: disconnect, STOPPING: self.service.is_stopping},
        }
        self._cycle = cycle = RequestCycle(
            self,
            disconnect,
            framing,
            is_head=method == b"HEAD",
            speaks_1_1=version == "1.1",
            keep_alive=keep_alive and version == "1.1" and not self.service.stopping,
            decoder=decoder,
        )
        scope["extensions"][INTERIM] = cycle.send_interim
        self._cycles.append((cycle, scope))
        # HTTP/1.1 responses have the order of the requests, so only one request runs at a time.
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
        """Record that the current request's body is complete."""
        cycle, self._cycle = self._cycle, None
        if cycle is None:
            return
        cycle.feed_end()
        if not (cycle.keep_alive and keep_alive):  # a trailer may have changed `keep_alive`
            cycle.keep_alive = False
            self._ignores_input = True  # no other request may follow
            if cycle.complete:
                self.close()

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Queue `data` to be sent in the event loop's next iteration.

        The last bytes of a response are sent at once if no other request runs. If other requests run, waiting lets the
        loop handle more events per poll.
        """
        if last and not self._unsent and len(self.service.tasks) == 1:
            self._transport.write(data)
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)  # one system call sends all data of one iteration of the loop
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > _MAX_BUFFERED_BYTES:
            self._flush()  # the transport must have the data to call `pause_writing` when too much is buffered

    def body_consumed(self, size: int) -> None:
        """Resume reading if the application has received enough of the buffered body."""
        self._queued_bytes -= size
        if self._paused:
            self._update_reading()

    def response_done(self, *, keep_alive: bool) -> None:
        """Start the next queued request, wait for a request, or close the connection."""
        self._cycles.popleft()
        if not keep_alive or (self.service.stopping and not self._cycles):
            self.end()
        elif self._cycles:
            self._begin(*self._cycles[0])
        else:
            self._awaits_head = self.in_head
            self._timer.set(HEAD_SECS if self.in_head else self.service.keep_alive_secs)
            self._mark_idle()
        if self._paused:
            self._update_reading()

    def end(self) -> None:
        """Send buffered data, let the client finish its request body, then `close`."""
        if self._cycle is None:
            self.close()
        else:
            self._linger()

    def close(self) -> None:
        """Send buffered data, then close the connection.

        Requests without a complete response are notified as if the client had disconnected.
        """
        self._ignores_input = True
        self.service.idle.remove(self)
        self._drop_calls()
        self._flush()
        self._timer.clear()
        self._disconnect_timer.clear()
        if not self._transport.is_closing():
            self._watch_stall()
            self._transport.close()

    def evict(self) -> bool:
        """Close the idle connection to make room for another one.

        Return False if a response has not been fully sent, or if a request waits in the kernel because this process has
        not read it yet. The connection then stays open.
        """
        # Closing now would lose the end of a response, or a request that the client has sent.
        if self._transport.get_write_buffer_size() or self._has_input():
            return False
        self.close()
        return True

    def stop(self) -> None:
        """Close the connection after the responses to its requests.

        The caller must have set `Service.stopping`, which closes a connection after its last response.
        """
        if not self._cycles:
            self.close()

    def _run_out_of_time(self) -> None:
        # No request head arrived in time. On a busy machine, received bytes may still wait in the kernel. In this case,
        # allow `LATE_SECS` to read them.
        if self._may_be_late and not self._ignores_input and not self._paused and self._has_input():
            self._may_be_late = False  # only once per request, or a client could stay connected forever
            self._timer.set(LATE_SECS)
        else:
            self.close()

    def _has_input(self) -> bool:
        return has_input(self._transport.get_extra_info("socket").fileno())

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
            self.service.idle.add(self, self.address, self.evict, self._loop.time())

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
            # Closing with unread data would send a reset, and the client would lose the response.
            self._transport.write_eof()
            self._update_reading()

    def _update_reading(self) -> None:
        """Stop or resume reading, depending on the buffered requests and body bytes."""
        full = not self._ignores_input and (
            self._queued_bytes > _MAX_BUFFERED_BYTES or len(self._cycles) > _MAX_WAITING
        )
        if full == self._paused or self._transport.is_closing():
            return
        self._paused = full
        if full:
            self._transport.pause_reading()
            # While reading is paused, the event loop does not report that the client has disconnected. The connection
            # therefore polls the state of the socket.
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
        # If fewer bytes wait than at the last check, the client has read some of them.
        if self._transport.get_write_buffer_size() < self._stalled_bytes:
            self._watch_stall()
        else:
            self._transport.abort()

    def _parse_slices(self, data: memoryview) -> None:
        # One read may contain thousands of small requests. When too many are queued, the rest is kept for later.
        while data and len(self._cycles) <= _MAX_WAITING and not self._ignores_input:
            size = CHUNK_BYTES if self._cycle is None else max(CHUNK_BYTES, self._cycle.missing_bytes)
            self._receive(data[:size])
            data = data[size:]
        self._unread = b"" if self._ignores_input else data

    def _receive(self, data: bytes | memoryview) -> None:
        if self._ignores_input:
            return
        try:
            self.parse(data)
        except ApiError as error:
            self._reject(error)
        else:
            if not self._cycles and not self._awaits_head:
                self._awaits_head = self._may_be_late = True
                self._timer.set(HEAD_SECS)

    def _reject(self, error: ApiError) -> None:
        """Answer an invalid request with an error, drop further data, and close."""
        if self._ignores_input:
            return
        level = logging.DEBUG if self._rejected else logging.INFO
        log.log(level, "invalid request rejected client=%s error=%s", self.address, quoted(error))
        if not self._cycles or not self._cycles[0][0].started:
            self.write(error_response(error))
        self._linger()
