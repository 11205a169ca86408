"""What comes on a connection, taken apart into heads and bodies of requests."""

import logging
from typing import Protocol

import httptools

from helexa.core.errors import ApiError, internal_error
from helexa.http.connections.request_head import Framing, Headers, framing, malformed

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 10


class Taker(Protocol):
    """Who is told what came.

    Attributes:
        max_head_bytes: that a head may have.
        max_headers: that a head may have.
    """

    max_head_bytes: int
    max_headers: int

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
        """Take a request's head; `keeps`: the client keeps the connection."""
        ...

    def take_body(self, body: bytes) -> None:
        """Some of its body came."""
        ...

    def take_end(self, *, keeps: bool) -> None:
        """All of it came."""
        ...


class Intake:
    """The parser of one connection.

    Attributes:
        in_head: some of a head came, and not all.
    """

    def __init__(self, taker: Taker) -> None:
        self.in_head = False
        self._taker = taker
        self._parser = self._new_parser()
        self._url = b""
        self._headers: Headers = []
        self._quiet_bytes = 0

    def close(self) -> None:
        """Forget the parser and the taker, which refer to this."""
        del self._parser, self._taker

    def feed(self, data: bytes | memoryview) -> None:
        """Parse the next bytes: at most `PIECE_BYTES`, or more of one body.

        Raises:
            ApiError: they cannot be parsed; nothing more can be.
        """
        self._quiet_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            raise self._reason(error) from None
        if self._quiet_bytes > self._taker.max_head_bytes + len(
            data
        ):  # of this piece nobody knows yet where it belongs
            raise self._too_large()

    def on_message_begin(self) -> None:
        """A request begins."""
        self.in_head = True
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """Some of its target is there."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is there, or a trailer."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """A head is there."""
        parser, headers = self._parser, self._headers
        version, method = parser.get_http_version(), parser.get_method()
        self._check_size()
        body_framing = framing(version, method, headers)
        if parser.should_upgrade():
            return
        self._quiet_bytes = 0
        self.in_head = False
        self._headers = []  # trailers end there
        self._taker.take_head(method, self._url, version, headers, body_framing, keeps=parser.should_keep_alive())

    def on_body(self, body: bytes) -> None:
        """Some of a body is there."""
        self._quiet_bytes = 0
        self._taker.take_body(body)

    def on_message_complete(self) -> None:
        """A request is complete."""
        if not self.in_head:  # else it is one of those that are parsed again
            self._quiet_bytes = 0
            self._taker.take_end(keeps=self._parser.should_keep_alive())

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # who says `close` with the first may send more
        return parser

    def _parse(self, rest: bytes | memoryview) -> None:
        while True:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = memoryview(rest)[upgrade.args[0] :]
                version = self._parser.get_http_version().encode()
                request_line = b"%s %s HTTP/%s\r\n" % (self._parser.get_method(), self._url, version)
                header_lines = [b"%s: %s\r\n" % pair for pair in self._headers if pair[0] != b"upgrade"]
                self._parser = self._new_parser()
                self._parser.feed_data(request_line + b"".join(header_lines) + b"\r\n")

    def _check_size(self) -> None:
        if len(self._headers) > self._taker.max_headers:
            raise self._too_large()
        if self._quiet_bytes + PIECE_BYTES > self._taker.max_head_bytes:  # else it cannot be that large
            size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
            if size > self._taker.max_head_bytes:
                raise self._too_large()

    def _too_large(self) -> ApiError:
        limits = f"{self._taker.max_head_bytes} bytes or {self._taker.max_headers} headers"
        return ApiError(431, "request_head_too_large", f"the head of the request is larger than {limits}")

    def _reason(self, error: httptools.HttpParserError) -> ApiError:
        cause = error.__context__  # what a callback raised
        if isinstance(cause, ApiError):
            return cause
        if cause is None or isinstance(cause, httptools.HttpParserError):
            return malformed("this is not a valid HTTP/1.1 request")
        log.error("a fault in the server", exc_info=cause)
        return internal_error()
