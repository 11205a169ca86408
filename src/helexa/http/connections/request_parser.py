"""Parses the bytes of a connection into the heads and bodies of requests."""

import logging
from typing import Protocol

import httptools

from helexa.core.errors import ApiError, internal_error
from helexa.http.connections.request_head import Framing, Headers, framing, malformed

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 10


class ParserSink(Protocol):
    """Interface of the object that receives parsed requests from a `RequestParser`.

    Attributes:
        max_head_bytes: maximum size of a request's head, in bytes.
        max_headers: maximum number of headers of a request.
    """

    max_head_bytes: int
    max_headers: int

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
        """Handle the head of a new request.

        Args:
            method: request method.
            url: request target.
            version: HTTP version, `1.0` or `1.1`.
            headers: headers with names in lower case.
            framing: length of the request body, and whether the client waits for `100 Continue`.
            keep_alive: True if the client wants the connection to stay open after the request.
        """
        ...

    def handle_body(self, body: bytes) -> None:
        """Handle the next bytes of the request body."""
        ...

    def handle_end(self, *, keep_alive: bool) -> None:
        """Handle the end of the request. `keep_alive` is True if the client wants the connection to stay open."""
        ...


class RequestParser:
    """Parses the requests of one connection, with limits on the size of heads.

    Attributes:
        in_head: True if only a part of a request's head has arrived so far.
    """

    def __init__(self, sink: ParserSink) -> None:
        self.in_head = False
        self._sink = sink
        self._parser = self._new_parser()
        self._url = b""
        self._headers: Headers = []
        self._unconfirmed_bytes = 0

    def close(self) -> None:
        """Release the references to the parser and the sink, which would otherwise form reference cycles."""
        del self._parser, self._sink

    def feed(self, data: bytes | memoryview) -> None:
        """Parse the next bytes.

        Args:
            data: the bytes. Unless they all belong to one request body, there are at most `CHUNK_BYTES`.

        Raises:
            ApiError: the bytes are not valid HTTP or the head is too large. The connection cannot be parsed further.
        """
        self._unconfirmed_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            raise self._api_error(error) from None
        if self._unconfirmed_bytes > self._sink.max_head_bytes + len(
            data
        ):  # the position of the bytes of `data` is not known yet
            raise self._too_large()

    def on_message_begin(self) -> None:
        """Start a new request (callback of httptools)."""
        self.in_head = True
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """Append to the request target (callback of httptools)."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header or a trailer (callback of httptools)."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Validate a complete head and pass it to the sink (callback of httptools)."""
        parser, headers = self._parser, self._headers
        version, method = parser.get_http_version(), parser.get_method()
        self._check_size()
        body_framing = framing(version, method, headers)
        if parser.should_upgrade():
            return
        self._unconfirmed_bytes = 0
        self.in_head = False
        self._headers = []  # trailers are collected here and dropped
        self._sink.handle_head(method, self._url, version, headers, body_framing, keep_alive=parser.should_keep_alive())

    def on_body(self, body: bytes) -> None:
        """Pass the next bytes of a request body to the sink (callback of httptools)."""
        self._unconfirmed_bytes = 0
        self._sink.handle_body(body)

    def on_message_complete(self) -> None:
        """Notify the sink of the end of a request (callback of httptools)."""
        if not self.in_head:  # otherwise the head is parsed again without its upgrade header
            self._unconfirmed_bytes = 0
            self._sink.handle_end(keep_alive=self._parser.should_keep_alive())

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # a client that sends `close` may still send further requests
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _parse(self, data: bytes | memoryview) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = memoryview(data)[upgrade.args[0] :]
                version = self._parser.get_http_version().encode()
                head = b"%s %s HTTP/%s\r\n" % (self._parser.get_method(), self._url, version)
                header_lines = [b"%s: %s\r\n" % pair for pair in self._headers if pair[0] != b"upgrade"]
                self._parser = self._new_parser()
                self._parser.feed_data(head + b"".join(header_lines) + b"\r\n")

    def _check_size(self) -> None:
        if len(self._headers) > self._sink.max_headers:
            raise self._too_large()
        if self._unconfirmed_bytes + CHUNK_BYTES > self._sink.max_head_bytes:  # otherwise the head is below the limit
            size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
            if size > self._sink.max_head_bytes:
                raise self._too_large()

    def _too_large(self) -> ApiError:
        limits = f"{self._sink.max_head_bytes} bytes or {self._sink.max_headers} headers"
        return ApiError(431, "request_head_too_large", f"the head of the request is larger than {limits}")

    def _api_error(self, error: httptools.HttpParserError) -> ApiError:
        cause = error.__context__  # the exception raised by a callback
        if isinstance(cause, ApiError):
            return cause
        if cause is None or isinstance(cause, httptools.HttpParserError):
            return malformed("this is not a valid HTTP/1.1 request")
        log.error("a fault in the server", exc_info=cause)
        return internal_error()
