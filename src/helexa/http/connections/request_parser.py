"""Parse a connection's bytes into heads and bodies of requests."""

import logging
from typing import Protocol

import httptools

from helexa.core.errors import ApiError, internal_error
from helexa.http.connections.request_head import Framing, Headers, framing, malformed

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 10


class ParserSink(Protocol):
    """Receiver of parsed requests.

    Attributes:
        max_head_bytes: size limit of a head, in bytes.
        max_headers: largest number of headers of a head.
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
        """Handle a request's head. `keeps` is True if the client keeps the connection open."""
        ...

    def take_body(self, body: bytes) -> None:
        """Handle a piece of the body."""
        ...

    def take_end(self, *, keeps: bool) -> None:
        """Handle the end of the request."""
        ...


class RequestParser:
    """The parser of one connection.

    Attributes:
        in_head: a part of a head has arrived.
    """

    def __init__(self, taker: ParserSink) -> None:
        self.in_head = False
        self._taker = taker
        self._parser = self._new_parser()
        self._url = b""
        self._headers: Headers = []
        self._quiet_bytes = 0

    def close(self) -> None:
        """Drop the parser and the receiver, which refer to this object."""
        del self._parser, self._taker

    def feed(self, data: bytes | memoryview) -> None:
        """Parse the next bytes: at most `PIECE_BYTES`, or more bytes of one body.

        Raises:
            ApiError: the bytes are invalid; the connection cannot be parsed any further.
        """
        self._quiet_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            raise self._reason(error) from None
        if self._quiet_bytes > self._taker.max_head_bytes + len(
            data
        ):  # the position of this piece's bytes is not known yet
            raise self._too_large()

    def on_message_begin(self) -> None:
        """Handle the beginning of a request."""
        self.in_head = True
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """Handle a piece of the request target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header or a trailer."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Handle the end of a head."""
        parser, headers = self._parser, self._headers
        version, method = parser.get_http_version(), parser.get_method()
        self._check_size()
        comes = framing(version, method, headers)
        if parser.should_upgrade():
            return
        self._quiet_bytes = 0
        self.in_head = False
        self._headers = []  # trailers are collected here and dropped
        self._taker.take_head(method, self._url, version, headers, comes, keeps=parser.should_keep_alive())

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a body."""
        self._quiet_bytes = 0
        self._taker.take_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request."""
        if not self.in_head:  # otherwise the head is parsed again without its upgrade header
            self._quiet_bytes = 0
            self._taker.take_end(keeps=self._parser.should_keep_alive())

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # a client that sends `close` may still send further requests
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _parse(self, rest: bytes | memoryview) -> None:
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
        if len(self._headers) > self._taker.max_headers:
            raise self._too_large()
        if self._quiet_bytes + PIECE_BYTES > self._taker.max_head_bytes:  # otherwise the head is below the limit
            size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
            if size > self._taker.max_head_bytes:
                raise self._too_large()

    def _too_large(self) -> ApiError:
        limits = f"{self._taker.max_head_bytes} bytes or {self._taker.max_headers} headers"
        return ApiError(431, "request_head_too_large", f"the head of the request is larger than {limits}")

    def _reason(self, error: httptools.HttpParserError) -> ApiError:
        cause = error.__context__  # the exception raised by a callback
        if isinstance(cause, ApiError):
            return cause
        if cause is None or isinstance(cause, httptools.HttpParserError):
            return malformed("this is not a valid HTTP/1.1 request")
        log.error("a fault in the server", exc_info=cause)
        return internal_error()
