"""HTTP client of model hubs: several addresses per host, redirects, time limits."""

import http.client
import os
import selectors
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from typing import Any, Self
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

from helexa.core.version import __version__
from helexa.neuron.sources.fetch_and_errors import WebError

_CONNECT_SECONDS = 3.0
# The delay that RFC 8305 ("Happy Eyeballs") recommends before the next address is tried, too.
_NEXT_ADDRESS_SECONDS = 0.25

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 5
_CHUNK_BYTES = 1 << 16  # larger chunks only cost memory: TLS connections deliver 16 KiB at a time
_TEXT_SECONDS = 60.0
_TRANSIENT_STATUSES = (408, 425, 429)


class UnreachableError(OSError):
    """None of a host's addresses responded within the timeout."""


def connect(address: tuple[str, int], timeout: float, source: object = None) -> socket.socket:
    """Connect to the first address of a host that responds.

    This function replaces `socket.create_connection`, which tries the addresses one by one. If a firewall drops the
    packets to an address, `socket.create_connection` waits until the timeout before it tries the next address. This
    function starts an attempt for the next address every 0.25 s, and the earlier attempts continue.

    Args:
        timeout: timeout of the established connection, in seconds. Connecting takes at most `min(timeout, 3)` seconds.
        source: not used. It exists because `socket.create_connection` has this parameter.

    Raises:
        OSError: the host has no address, or all addresses refuse the connection.
        UnreachableError: no address responds within the timeout.
    """
    addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    seconds = min(timeout, _CONNECT_SECONDS)
    deadline = time.monotonic() + seconds
    failure = OSError("no address")
    with selectors.DefaultSelector() as pending, ExitStack() as stack:
        while addresses or pending.get_map():
            if addresses:
                family, kind, protocol, _, socket_address = addresses.pop(0)
                try:
                    connection = stack.enter_context(socket.socket(family, kind, protocol))
                    connection.setblocking(False)
                    with suppress(BlockingIOError):
                        connection.connect(socket_address)
                except OSError as error:
                    failure = error
                    continue
                pending.register(connection, selectors.EVENT_WRITE, connection)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise UnreachableError(f"{address[0]}:{address[1]} cannot be reached: no response for {seconds:g} s")
            for key, _ in pending.select(min(remaining, _NEXT_ADDRESS_SECONDS) if addresses else remaining):
                connection: socket.socket = key.data
                pending.unregister(connection)
                if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failure = OSError(code, os.strerror(code))
                    continue
                connection = socket.socket(fileno=connection.detach())  # leaving the context closes the other sockets
                connection.settimeout(timeout)
                return connection
    raise failure


class SiteResponse:
    """A successful HTTP response. It is a context manager that closes the connection."""

    def __init__(self, where: str, response: http.client.HTTPResponse, timeout: float) -> None:
        # Scheme, host and port of the server that sent the response. After a redirect, it differs from the requested
        # server.
        self.where = where
        self.length: int | None = response.length  # length of the response body in bytes, or None if unknown
        self._response = response
        self._timeout = timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    @property
    def content_range(self) -> str | None:
        """`Content-Range` of a partial response; None if the response has the whole file."""
        return self._response.headers.get("Content-Range", "") if self._response.status == 206 else None

    def chunks(self) -> Iterator[bytes]:
        """Yield the chunks of the response body as they arrive.

        Raises:
            WebError: no data arrived within the timeout, or the connection broke.
        """
        done = 0
        # Some versions of http.client do not count bytes, and reading beyond the length would block.
        while done != self.length:
            size = _CHUNK_BYTES if self.length is None else min(_CHUNK_BYTES, self.length - done)
            try:
                chunk = self._response.read1(size)
            except (OSError, http.client.HTTPException) as error:
                raise _connection_error(self.where, error, self._timeout) from error
            if not chunk and self.length is not None:
                raise WebError(self.where, f"{self.where} closed the connection after {done} of {self.length} bytes")
            if not chunk:
                return
            done += len(chunk)
            yield chunk

    def text(self, limit: int) -> bytes:
        """Return the whole response body.

        Raises:
            WebError: the connection broke or timed out, the body is longer than `limit` bytes, or reading takes too
                long.
        """
        text = bytearray()
        deadline = time.monotonic() + _TEXT_SECONDS
        for chunk in self.chunks():
            text += chunk
            if len(text) > limit:
                raise WebError(
                    self.where,
                    f"{self.where} sends more than {limit >> 20} MiB, not a list of files; check the endpoint",
                    transient=False,
                )
            if time.monotonic() > deadline:
                raise WebError(
                    self.where, f"{self.where} needs more than {_TEXT_SECONDS:g} s to send the list of files"
                )
        return bytes(text)


class Site:
    """An HTTP file server."""

    def __init__(self, url: str, token: str | None, timeout: float) -> None:
        self._url = url.rstrip("/")
        # Bearer token, or None. The token is sent only to this server, and not to other servers after a redirect.
        self._token = token
        self._timeout = timeout  # a connection fails if no data arrives for this number of seconds
        self._opener = OpenerDirector()
        # Handlers are listed explicitly, because the default opener also follows redirects to ftp: and file: URLs.
        for handler in (ProxyHandler(), _Http(), _Https()):
            self._opener.add_handler(handler)
        for handler in (UnknownHandler(), HTTPDefaultErrorHandler(), HTTPErrorProcessor()):
            self._opener.add_handler(handler)

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return self._url

    @property
    def has_token(self) -> bool:
        """Whether requests to the site include a token."""
        return self._token is not None

    def get(self, path: str, start: int = 0, stop: int | None = None, timeout: float | None = None) -> SiteResponse:
        """Request the file at `path`, follow redirects, and return the open response.

        The caller must close the response. A site that ignores the range sends the whole file.

        Args:
            start, stop: offset of the range's first byte, and of the byte after the range. None for the file's end.

        Raises:
            WebError: the site is unreachable or returned an error.
        """
        timeout = self._timeout if timeout is None else timeout
        url = self._url + quote(path, safe="/?=")
        for _ in range(_MAX_REDIRECTS):
            where = origin(url)
            if not where or "@" in urlsplit(url).netloc:
                name = where or "an endpoint"  # the endpoint may contain a secret
                raise WebError(name, f"{name} is not a valid address; correct the endpoint", transient=False)
            request = Request(url, headers={"User-Agent": f"helexa/{__version__}", "Accept-Encoding": "identity"})
            if start or stop is not None:
                request.add_header("Range", f"bytes={start}-{'' if stop is None else stop - 1}")
            if self._token and where == origin(self._url):
                request.add_header("Authorization", f"Bearer {self._token}")
            try:
                return SiteResponse(where, self._opener.open(request, timeout=timeout), timeout)
            except HTTPError as error:
                with error:
                    if error.code not in _REDIRECTS:
                        raise _status_error(where, error) from None
                    url = _redirect_target(url, error.headers.get("Location", ""))
            except (OSError, http.client.HTTPException) as error:
                raise _connection_error(where, error, timeout) from error
            except ValueError:  # the error's text quotes the invalid value, which may be secret
                reason = f"the address of {where}, or the token for it, has characters that HTTP does not allow"
                raise WebError(where, reason, transient=False) from None
        raise WebError(
            origin(self._url),
            f"{origin(self._url)} redirects more than {_MAX_REDIRECTS} times; check the endpoint",
            transient=False,
        )


def _connection(host: str, *, secure: bool = False, **arguments: Any) -> http.client.HTTPConnection:
    connection = (http.client.HTTPSConnection if secure else http.client.HTTPConnection)(host, **arguments)
    connection._create_connection = connect  # pyright: ignore[reportAttributeAccessIssue]
    return connection


class _Http(HTTPHandler):
    def http_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(_connection, req)


class _Https(HTTPSHandler):
    def https_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(_connection, req, secure=True, context=_certificates())


def origin(url: str) -> str:
    """Return scheme, host and port of `url`, without secrets; "" if invalid."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return ""
    if not host:
        return ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{'' if port is None else f':{port}'}"


def _redirect_target(url: str, location: str) -> str:
    try:
        target = urljoin(url, location)
    except ValueError:
        target = ""
    schemes = ("https:",) if url.startswith("https:") else ("https:", "http:")
    if not location or not origin(target).startswith(schemes):
        allowed = " or ".join(schemes).replace(":", "")
        problem = f"{origin(url)} redirects to an address that is not {allowed}; check the endpoint"
        raise WebError(origin(url), problem, transient=False)
    return target


def _status_error(where: str, error: HTTPError) -> WebError:
    return WebError(
        where,
        f"{where} answered HTTP {error.code}",
        status=error.code,
        code=error.headers.get("X-Error-Code", "")[:100],
        retry_after=_seconds(error.headers.get("Retry-After", "")),
        transient=error.code >= 500 or error.code in _TRANSIENT_STATUSES,
    )


def _seconds(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _connection_error(where: str, error: Exception, timeout: float) -> WebError:
    cause = error.reason if isinstance(error, URLError) and isinstance(error.reason, Exception) else error
    match cause:
        case UnreachableError():
            return WebError(where, str(cause))
        case TimeoutError():
            return WebError(where, f"{where} sent nothing for {timeout:g} s")
        case ConnectionRefusedError():
            return WebError(where, f"{where} refuses connections: nothing listens there")
        case ssl.SSLCertVerificationError():
            reason = f"the certificate of {where} is not trusted ({cause.verify_message}); set SSL_CERT_FILE to its CA"
            return WebError(where, reason, transient=False)
        case OSError() if type(cause).__name__ == "gaierror":
            return WebError(where, f"{where} cannot be resolved ({cause.strerror}); check the name and the network")
        case ConnectionError() | http.client.HTTPException():
            return WebError(where, f"{where} closed the connection: {type(cause).__name__}")
        case _:
            text = (str(cause).splitlines() or [""])[0][:200]
            return WebError(where, f"{where} cannot be reached: {type(cause).__name__}: {text}")


@cache
def _certificates() -> ssl.SSLContext:
    """Return a TLS context that accepts the certificates of the system and of certifi."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
