"""Parses the bytes of a connection into the heads and bodies of requests."""

import http
import logging
import re

import httptools
import orjson

from helexa.core.errors import ApiError, internal_error
from helexa.http.content_coding import ACCEPTED, BodyDecoder
from helexa.http.headers import Headers

log = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 10

_PHRASES = {status.value: status.phrase for status in http.HTTPStatus}
STATUS_LINES = {status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(200, 600)}

_ABSOLUTE_FORM = re.compile(rb"https?://([^/?#@]+)(?=[/?#]|$)", re.IGNORECASE)
_FRAMING_HEADERS = frozenset({b"host", b"content-length", b"expect", b"transfer-encoding"})


# Length of a request body (None if chunked), and True if the client waits for `100 Continue` before the body.
Framing = tuple[int | None, bool]


def framing(version: str, method: bytes, headers: Headers) -> Framing:
    """Return the length of the body, and whether the client waits for `100 Continue`.

    Also check the HTTP version, the method, and the headers `Host` and `transfer-encoding`.

    Raises:
        ApiError: status 400, if one of these checks fails.
    """
    if (version != "1.1" and version != "1.0") or method == b"CONNECT":
        raise malformed(
            f"{method.decode('latin-1')[:20]} with HTTP/{version} is not supported; use HTTP/1.1 or HTTP/1.0, and not "
            "the method CONNECT"
        )
    hosts, expects_continue = 0, False
    length: int | None = 0
    for name, value in headers:
        if name not in _FRAMING_HEADERS:
            continue
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            length = int(value)  # the parser rejects invalid and repeated values
        elif name == b"expect":
            expects_continue = value.lower() == b"100-continue"
        elif value.strip().lower() != b"chunked" or version == "1.0":
            raise malformed(
                f"transfer-encoding {value.decode('latin-1')[:40]!r} with HTTP/{version} is not supported; send "
                "'chunked' with HTTP/1.1"
            )
        else:
            length = None
    if hosts > 1 or (not hosts and version == "1.1"):
        raise malformed(f"the request has {hosts} Host headers, but must have exactly one")
    return length, expects_continue and version == "1.1"


Target = tuple[bytes, bytes, bytes | None]
"""Path, query, and authority (host and port) of a request target.

The authority is None if the target is only a path.
"""


def target(url: bytes) -> Target:
    """Split the target of a request line into path, query, and host with port.

    If the target is an absolute URL, the caller must replace the `Host` header by the URL's host and port (RFC 9112,
    section 3.2.2).

    Raises:
        ApiError: status 400, if the target is an absolute URL that has no host, contains credentials, or is not an
            http or https URL.
        httptools.HttpParserInvalidURLError: the target cannot be parsed.
    """
    if url.startswith(b"/") and b"#" not in url:
        path, _, query = url.partition(b"?")
        return path, query, None
    parsed = httptools.parse_url(url)
    absolute_form = _ABSOLUTE_FORM.match(url)
    if absolute_form is None and parsed.schema is not None:
        raise malformed("the request target must be a path or an http URL without credentials")
    return parsed.path or b"/", parsed.query or b"", absolute_form and absolute_form[1]


def malformed(message: str) -> ApiError:
    """Return an error with status 400 for a request that is not valid HTTP."""
    return ApiError(400, "malformed_http", message)


def error_response(error: ApiError) -> bytes:
    """Return the response to an invalid request, with the header `connection: close`."""
    body = orjson.dumps(error.envelope())
    error_headers = "".join(f"{name.lower()}: {value}\r\n" for name, value in error.headers().items()).encode()
    body_headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    return STATUS_LINES[error.status] + error_headers + body_headers + body


class RequestParser:
    """Parses the requests of one connection, with limits on the size of heads.

    `ClientConnection` is a subclass, and handles the parsed parts. The strict parser (llhttp) rejects requests with
    ambiguous framing. HTTP/1.1 requests must have exactly one `Host` header, and `chunked` is the only transfer
    encoding. Trailers are dropped.
    """

    max_head_bytes = 32 << 10  # maximum size of a request's head, of trailers, and of chunk extensions, in bytes
    max_headers = 100  # maximum number of headers of a request

    def __init__(self) -> None:
        self.in_head = False  # True if only a part of a request's head has arrived so far
        self._parser = self._new_parser()
        self._url = b""
        self._headers: Headers = []
        self._unconfirmed_bytes = 0

    def handle_head(
        self, method: bytes, url: bytes, version: str, headers: Headers, framing: Framing, *, keep_alive: bool
    ) -> None:
        """Handle the head of a new request.

        Args:
            version: HTTP version, `1.0` or `1.1`.
            headers: headers with names in lower case.
            framing: length of the request body, and whether the client waits for `100 Continue`.
            keep_alive: True if the client wants the connection to stay open after the request.
        """
        raise NotImplementedError

    def handle_body(self, body: bytes) -> None:
        """Handle the next bytes of the request body."""
        raise NotImplementedError

    def handle_end(self, *, keep_alive: bool) -> None:
        """Handle the end of the current request.

        `keep_alive` is True if the client wants the connection to stay open after the request.
        """
        raise NotImplementedError

    def release_parser(self) -> None:
        """Release the parser, which would otherwise form a reference cycle."""
        del self._parser

    def parse(self, data: bytes | memoryview) -> None:
        """Parse the next bytes of the connection.

        `data` may be longer than `CHUNK_BYTES` only if all of it belongs to the body of one request.

        Raises:
            ApiError: the bytes are not valid HTTP or the head is too large. The connection cannot be parsed further.
        """
        self._unconfirmed_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            raise self._api_error(error) from None
        # It is not known which bytes of `data` belong to the head, so none of them count toward the head's limit yet.
        if self._unconfirmed_bytes > self.max_head_bytes + len(data):
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
        """Validate a head; if it has no upgrade header, call `handle_head` (callback)."""
        parser, headers = self._parser, self._headers
        version, method = parser.get_http_version(), parser.get_method()
        self._check_size()
        body_framing = framing(version, method, headers)
        if parser.should_upgrade():
            return
        self._unconfirmed_bytes = 0
        self.in_head = False
        self._headers = []  # trailers are collected here and dropped
        self.handle_head(method, self._url, version, headers, body_framing, keep_alive=parser.should_keep_alive())

    def on_body(self, body: bytes) -> None:
        """Pass the next bytes of a body to `handle_body` (callback of httptools)."""
        self._unconfirmed_bytes = 0
        self.handle_body(body)

    def on_message_complete(self) -> None:
        """Call `handle_end` at the end of a request (callback of httptools)."""
        # After a head with an upgrade header, httptools ends the message, and `_feed` parses the head again without the
        # header. `in_head` is still True then.
        if not self.in_head:
            self._unconfirmed_bytes = 0
            self.handle_end(keep_alive=self._parser.should_keep_alive())

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Without this leniency, data after a request with `connection: close` would be an error. The data is dropped.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _feed(self, data: bytes | memoryview) -> None:
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
        if len(self._headers) > self.max_headers:
            raise self._too_large()
        if self._unconfirmed_bytes + CHUNK_BYTES > self.max_head_bytes:  # otherwise the head is surely below the limit
            size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
            if size > self.max_head_bytes:
                raise self._too_large()

    def _too_large(self) -> ApiError:
        limits = f"{self.max_head_bytes} bytes or {self.max_headers} headers"
        return ApiError(431, "request_head_too_large", f"the head of the request exceeds {limits}; shorten the headers")

    def _api_error(self, error: httptools.HttpParserError) -> ApiError:
        cause = error.__context__  # the exception raised by a callback
        if isinstance(cause, ApiError):
            return cause
        if cause is None or isinstance(cause, httptools.HttpParserError):
            return malformed("the data is not a valid HTTP/1.1 request; if the client uses HTTPS, use an http:// URL")
        log.error("unexpected error while parsing a request; the client gets 500", exc_info=cause)
        return internal_error()


def body_decoder(headers: Headers) -> tuple[BodyDecoder | None, Headers]:
    """Return the decoder of a request's body, and headers without `content-encoding`.

    If the body has no supported encoding, the decoder is None and the headers are unchanged.
    """
    if b"content-encoding" not in dict(headers):
        return None, headers
    codings = [value for name, value in headers if name == b"content-encoding"]
    if len(codings) != 1:
        return None, headers
    coding = codings[0].strip().lower().decode("latin-1").removeprefix("x-")
    if coding not in ACCEPTED.split(", "):
        return None, headers
    return BodyDecoder(coding), [pair for pair in headers if pair[0] != b"content-encoding"]
