"""A client's connection, with what a server on a network must not take from strangers."""

import asyncio
import logging
from collections import deque
from typing import cast
from urllib.parse import unquote

import httptools
import orjson
from starlette.types import Scope

from helexa.core.errors import ApiError
from helexa.http.alarm import Alarm
from helexa.http.call import STATUS_LINES, Call
from helexa.http.hang_up import HangUp
from helexa.http.head import is_expecting, malformed, target
from helexa.http.service import Service

log = logging.getLogger(__name__)

HEAD_SECS = 20.0
TAKE_SECS = 300.0

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
    - Requests are answered in their order. While many of them, or much of a body, wait to be taken, no more is read.
    - Who hangs up is noticed by all requests that wait on the connection, not by the last one only.
    - Trailers are dropped: they are no headers.
    - A wish for another protocol (`Upgrade`, which some HTTP clients add to every first request) is ignored. The
      parser takes what follows it for that protocol, and would lose the request's body.
    - What cannot be read is refused in the envelope of all errors.

    Attributes:
        room: set once the client took enough of what is written; None while more may be.
        service: what all connections share.
    """

    max_head_bytes = 32 << 10
    max_headers = 100

    _transport: asyncio.Transport

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self.service = service
        self.room: asyncio.Event | None = None
        self._loop = loop
        self._parser = self._new_parser()
        self._alarm = Alarm(loop, self._too_late)
        self._awaits_head = True
        self._patience: asyncio.TimerHandle | None = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._piece_bytes = 0
        self._quiet_bytes = 0
        self._held_bytes = 0
        self._paused = False
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
        self._alarm.set(HEAD_SECS)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._alarm.stop()
        self.resume_writing()
        for call, _ in self._calls:
            call.lose()
        self._calls.clear()
        self._unsent.clear()
        self.service.leave(self)
        del self._parser  # it refers to us

    def pause_writing(self) -> None:
        """The client is slower than the answer."""
        self.room = asyncio.Event()
        self._patience = self._loop.call_later(TAKE_SECS, self._transport.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self.room is not None:
            self.room.set()
            self.room = None

    def data_received(self, data: bytes) -> None:
        """Parse what came; what cannot be parsed ends the connection."""
        self._piece_bytes = len(data)
        self._quiet_bytes += self._piece_bytes
        try:
            self._parse(data)
            if self._quiet_bytes > self.max_head_bytes + len(data):  # of this piece nobody knows yet where it belongs
                raise self._head_too_large()
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback raised
            self._refuse(cause if isinstance(cause, ApiError) else malformed("this is not a valid HTTP/1.1 request"))
        except ApiError as error:
            self._refuse(error)
        else:
            if not self._calls and not self._awaits_head:
                self._awaits_head = True
                self._alarm.set(HEAD_SECS)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """Some of its target is there."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is there, or a trailer."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """A head is there: start the request, or let it wait for the answers before its own."""
        parser, headers, service = self._parser, self._headers, self.service
        version, method = parser.get_http_version(), parser.get_method()
        self._check_size()
        expects = is_expecting(version, method, headers)
        if parser.should_upgrade():
            return
        self._quiet_bytes = 0
        self._awaits_head = False
        self._alarm.clear()
        raw_path, query = target(self._url)
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
        self._headers = []  # trailers end there
        self._call = call = Call(
            self,
            hang_up,
            is_head=method == b"HEAD",
            speaks_1_1=version == "1.1",
            keep_alive=version == "1.1" and parser.should_keep_alive() and not service.stopping,
        )
        if expects:
            call.expect()
        self._calls.append((call, scope))
        if len(self._calls) == 1:
            self._begin(call, scope)
        else:
            self._regulate()

    def on_body(self, body: bytes) -> None:
        """Some of a body is there."""
        self._quiet_bytes = 0
        if self._call is not None:
            self._held_bytes += self._call.feed(body)
            if self._held_bytes > _MAX_HELD_BYTES:
                self._regulate()

    def on_message_complete(self) -> None:
        """A request is complete."""
        if not self._parser.should_upgrade() and self._call is not None:
            self._quiet_bytes = 0
            self._call.feed_end()

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
            self.close()
        elif self._calls:
            self._begin(*self._calls[0])
        else:
            self._awaits_head = False
            self._alarm.set(self.service.keep_alive_secs)
        if self._paused:
            self._regulate()

    def close(self) -> None:
        """Send what is written, and end."""
        self._flush()
        self._transport.close()

    def stop(self) -> None:
        """End, after the answers that are under way."""
        if not self._calls:
            self._transport.close()

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

    def _regulate(self) -> None:
        """Read no more than the application takes."""
        full = self._held_bytes > _MAX_HELD_BYTES or len(self._calls) > _MAX_WAITING
        if full == self._paused or self._transport.is_closing():
            return
        self._paused = full
        if full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # who says `close` with the first may send more
        return parser

    def _parse(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
                version = self._parser.get_http_version().encode()
                head = b"%s %s HTTP/%s\r\n" % (self._parser.get_method(), self._url, version)
                kept = [b"%s: %s\r\n" % pair for pair in self._headers if pair[0] != b"upgrade"]
                self._parser = self._new_parser()
                self._parser.feed_data(head + b"".join(kept) + b"\r\n")

    def _check_size(self) -> None:
        if len(self._headers) > self.max_headers:
            raise self._head_too_large()
        if self._quiet_bytes + self._piece_bytes > self.max_head_bytes:  # else it cannot be that large
            size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
            if size > self.max_head_bytes:
                raise self._head_too_large()

    def _head_too_large(self) -> ApiError:
        limits = f"{self.max_head_bytes} bytes or {self.max_headers} headers"
        return ApiError(431, "request_head_too_large", f"the head of the request is larger than {limits}")

    def _too_late(self) -> None:
        if self._transport.is_closing():
            self._transport.abort()
        else:
            self._transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be a request, and hear no more from here."""
        log.info("%s: %s", self._client[0], error)
        for call, _ in self._calls:
            call.lose()
        if not self._calls or not self._calls[0][0].started:
            body = orjson.dumps(error.envelope())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.write(STATUS_LINES[error.status] + head + body)
        self.close()
