"""A client's connection: uvicorn's, with what a server on a network must not take from strangers."""

import asyncio
import logging
from collections import deque
from typing import Any, cast

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from helexa.core.errors import ApiError

log = logging.getLogger(__name__)

HEAD_SECS = 20.0
TAKE_SECS = 300.0


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.error = ApiError(status, code, message)


class Connection(HttpToolsProtocol):
    """One connection.

    uvicorn and its parser (llhttp, strict) refuse what is ambiguous about where a request ends. Added to that:

    - A head must be there within `HEAD_SECS`, and has at most `max_head_bytes` and `max_headers`. As much may come that
      is neither a head's end nor a body: trailers, extensions of chunks.
    - Who takes nothing of an answer for `TAKE_SECS` is cut off: a node works for them meanwhile.
    - HTTP/1.1 has exactly one `Host`; a body comes as it is or `chunked`, and is never coded further.
    - Who hangs up is noticed by all requests that wait on the connection, not by the last one only.
    - Trailers are dropped: they are no headers.
    - A wish for another protocol (`Upgrade`, which some HTTP clients add to every first request) is ignored. The
      parser takes what follows it for that protocol, and would lose the request's body.
    - What cannot be read is refused in the envelope of all errors.
    """

    max_head_bytes = 32 << 10
    max_headers = 100

    _quiet_bytes = 0
    _deadline: asyncio.TimerHandle | None = None
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # type: ignore[override]
        """A client is there; its first head is awaited."""
        self._earlier: deque[RequestResponseCycle] = deque()  # before the last one, the oldest first
        super().connection_made(cast(asyncio.Transport, _Corked(cast(asyncio.Transport, transport))))
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._clear_deadline()
        self._clear_patience()
        for cycle in self._earlier:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client is slower than the answer."""
        super().pause_writing()
        self._patience = self.loop.call_later(TAKE_SECS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        self._clear_patience()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse what came; what cannot be parsed ends the connection."""
        self._unset_keepalive_if_required()
        self._quiet_bytes += len(data)
        try:
            self._parse(data)
            if self._quiet_bytes > self.max_head_bytes + len(data):  # of this piece nobody knows yet where it belongs
                raise self._head_too_large()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.error if isinstance(cause, _Refused) else _malformed())
        except _Refused as refused:
            self._refuse(refused.error)
        else:
            if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._set_deadline()

    def on_headers_complete(self) -> None:
        """A head is there: start the request."""
        self._check_head()
        if self.parser.should_upgrade():
            return
        self._quiet_bytes = 0
        self._clear_deadline()
        while self._earlier and self._earlier[0].response_complete:
            self._earlier.popleft()
        if self.cycle is not None and not self.cycle.response_complete:
            self._earlier.append(self.cycle)
        super().on_headers_complete()
        self.headers = []  # trailers end there

    def on_body(self, body: bytes) -> None:
        """Some of a body is there."""
        self._quiet_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is complete."""
        if not self.parser.should_upgrade():
            self._quiet_bytes = 0
            super().on_message_complete()

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                head = b"%s %s HTTP/%s\r\n" % (
                    self.parser.get_method(),
                    self.url,
                    self.parser.get_http_version().encode(),
                )
                kept = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(head + b"".join(kept) + b"\r\n")

    def _check_head(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1") or self.parser.get_method() == b"CONNECT":
            raise _Refused(400, "malformed_http", "this server speaks HTTP/1.1, and is no proxy")
        size, hosts = len(self.url), 0
        for name, value in self.headers:
            size += len(name) + len(value)
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and (value.strip().lower() != b"chunked" or version == "1.0"):
                raise _Refused(400, "malformed_http", "the only transfer-encoding is chunked, and only of HTTP/1.1")
        if size > self.max_head_bytes or len(self.headers) > self.max_headers:
            raise self._head_too_large()
        if hosts > 1 or (not hosts and version == "1.1"):
            raise _Refused(400, "malformed_http", "a request has exactly one Host header")

    def _head_too_large(self) -> _Refused:
        limits = f"{self.max_head_bytes} bytes or {self.max_headers} headers"
        return _Refused(431, "request_head_too_large", f"the head of the request is larger than {limits}")

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECS, self._too_late)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _clear_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _too_late(self) -> None:
        self._deadline = None
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be a request, and hear no more from here."""
        log.info("%s: %s", self.client[0] if self.client else "-", error)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = orjson.dumps(error.envelope())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


class _Corked:
    """A transport that sends in one piece what is written within one turn of the event loop: head and body of an answer
    then cost one system call instead of two."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        pieces, self._pieces = self._pieces, []
        if pieces and not self._transport.is_closing():
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))


def _malformed() -> ApiError:
    return ApiError(400, "malformed_http", "this is not a valid HTTP/1.1 request")
