"""HTTP file servers, reached through the user's proxies. The token is sent to the configured site only."""

import http.client
import ssl
import time
from collections.abc import Iterator
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
from helexa.neuron.sources.dial import UnreachableError, dial

_MOVED = (301, 302, 303, 307, 308)
_MOST_MOVES = 5
_CHUNK_BYTES = 1 << 16  # larger chunks only cost memory: TLS connections deliver 16 KiB at a time
_TEXT_SECONDS = 60.0
_PASSING_STATUSES = (408, 425, 429)


class WebError(Exception):
    """A failed HTTP request or an unusable response.

    Attributes:
        where: origin of the site, without secrets.
        status: HTTP status, or None without a response.
        code: error code of the Hugging Face Hub, such as `GatedRepo`, or an empty string.
        retry_after: value of `Retry-After` in seconds, or None.
        passing: the error may be transient, so a retry is useful.
    """

    def __init__(
        self,
        where: str,
        reason: str,
        *,
        status: int | None = None,
        code: str = "",
        retry_after: int | None = None,
        passing: bool = True,
    ) -> None:
        super().__init__(reason)
        self.where = where
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.passing = passing


class Answer:
    """A response of a site. Leaving the context closes the connection.

    Attributes:
        where: origin that sends the response; redirects may lead to another origin than the requested one.
        length: length of the body in bytes, or None if unknown.
    """

    def __init__(self, where: str, response: http.client.HTTPResponse, patience: float) -> None:
        self.where = where
        self.length: int | None = response.length
        self._response = response
        self._patience = patience

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()

    @property
    def content_range(self) -> str | None:
        """Value of `Content-Range` of a partial response; None if the response is the whole file."""
        return self._response.headers.get("Content-Range", "") if self._response.status == 206 else None

    def chunks(self) -> Iterator[bytes]:
        """Yield the body in pieces as they arrive.

        Raises:
            WebError: no data arrived within the timeout, or the connection broke.
        """
        done = 0
        # Some versions of http.client do not count bytes, and reading beyond the length would block.
        while done != self.length:
            wanted = _CHUNK_BYTES if self.length is None else min(_CHUNK_BYTES, self.length - done)
            try:
                chunk = self._response.read1(wanted)
            except (OSError, http.client.HTTPException) as error:
                raise _broken(self.where, error, self._patience) from error
            if not chunk and self.length is not None:
                raise WebError(self.where, f"hung up after {done} of {self.length} bytes")
            if not chunk:
                return
            done += len(chunk)
            yield chunk

    def text(self, limit: int) -> bytes:
        """Return the whole body.

        Raises:
            WebError: a chunk failed as in `chunks`, the body is longer than `limit` bytes, or reading it took too long.
        """
        text = bytearray()
        deadline = time.monotonic() + _TEXT_SECONDS
        for chunk in self.chunks():
            text += chunk
            if len(text) > limit:
                raise WebError(self.where, f"sends more than {limit >> 20} MiB where a list is expected", passing=False)
            if time.monotonic() > deadline:
                raise WebError(self.where, "sends its list too slowly")
        return bytes(text)


class Site:
    """A file server.

    Args:
        url: base URL.
        token: bearer token, sent to this site and not to redirect targets.
        patience: seconds without data after which a connection counts as broken.
    """

    def __init__(self, url: str, token: str | None, patience: float) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._patience = patience
        self._opener = OpenerDirector()
        # Handlers are listed explicitly, because the default opener also follows redirects to ftp: and file: URLs.
        for handler in (ProxyHandler(), _Http(), _Https()):
            self._opener.add_handler(handler)
        for handler in (UnknownHandler(), HTTPDefaultErrorHandler(), HTTPErrorProcessor()):
            self._opener.add_handler(handler)

    @property
    def url(self) -> str:
        """The base URL."""
        return self._url

    @property
    def has_token(self) -> bool:
        """Return whether requests carry a token."""
        return self._token is not None

    def get(self, path: str, start: int = 0, stop: int | None = None, patience: float | None = None) -> Answer:
        """Request a file, from byte `start` to byte `stop` (exclusive) or to its end.

        Raises:
            WebError: the site is unreachable or returned an error.
        """
        patience = self._patience if patience is None else patience
        url = self._url + quote(path, safe="/?=")
        for _ in range(_MOST_MOVES):
            where = origin(url)
            if not where or "@" in urlsplit(url).netloc:
                raise WebError(where or "an endpoint", "is no address that can be used: correct it", passing=False)
            request = Request(url, headers={"User-Agent": f"helexa/{__version__}", "Accept-Encoding": "identity"})
            if start or stop is not None:
                request.add_header("Range", f"bytes={start}-{'' if stop is None else stop - 1}")
            if self._token and where == origin(self._url):
                request.add_header("Authorization", f"Bearer {self._token}")
            try:
                return Answer(where, self._opener.open(request, timeout=patience), patience)
            except HTTPError as error:
                with error:
                    if error.code not in _MOVED:
                        raise _refused(where, error) from None
                    url = _moved(url, error.headers.get("Location", ""))
            except (OSError, http.client.HTTPException) as error:
                raise _broken(where, error, patience) from error
            except ValueError:  # the error's text quotes the invalid value, which may be secret
                reason = "cannot be asked: its address, or the token for it, has characters that HTTP does not allow"
                raise WebError(where, reason, passing=False) from None
        raise WebError(origin(self._url), f"redirects more than {_MOST_MOVES} times", passing=False)


def _dialed(host: str, *, secure: bool = False, **arguments: Any) -> http.client.HTTPConnection:
    connection = (http.client.HTTPSConnection if secure else http.client.HTTPConnection)(host, **arguments)
    connection._create_connection = dial  # pyright: ignore[reportAttributeAccessIssue]
    return connection


class _Http(HTTPHandler):
    def http_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(_dialed, req)


class _Https(HTTPSHandler):
    def https_open(self, req: Request) -> http.client.HTTPResponse:
        return self.do_open(_dialed, req, secure=True, context=_certificates())


def origin(url: str) -> str:
    """Return scheme, host and port of `url`, the parts without secrets; empty if `url` is invalid."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return ""
    if not host:
        return ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{'' if port is None else f':{port}'}"


def _moved(url: str, location: str) -> str:
    try:
        target = urljoin(url, location)
    except ValueError:
        target = ""
    schemes = ("https:",) if url.startswith("https:") else ("https:", "http:")
    if not location or not origin(target).startswith(schemes):
        raise WebError(origin(url), "redirects to an address that is not followed", passing=False)
    return target


def _refused(where: str, error: HTTPError) -> WebError:
    return WebError(
        where,
        f"answered HTTP {error.code}",
        status=error.code,
        code=error.headers.get("X-Error-Code", "")[:100],
        retry_after=_seconds(error.headers.get("Retry-After", "")),
        passing=error.code >= 500 or error.code in _PASSING_STATUSES,
    )


def _seconds(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _broken(where: str, error: Exception, patience: float) -> WebError:
    cause = error.reason if isinstance(error, URLError) and isinstance(error.reason, Exception) else error
    match cause:
        case UnreachableError():
            return WebError(where, str(cause))
        case TimeoutError():
            return WebError(where, f"sent nothing for {patience:g} s")
        case ConnectionRefusedError():
            return WebError(where, "refuses connections: nothing listens there")
        case ssl.SSLCertVerificationError():
            reason = f"has a certificate that is not accepted ({cause.verify_message}); SSL_CERT_FILE may name another"
            return WebError(where, reason, passing=False)
        case OSError() if type(cause).__name__ == "gaierror":
            return WebError(where, f"is a name that cannot be resolved ({cause.strerror}): is there a network?")
        case ConnectionError() | http.client.HTTPException():
            return WebError(where, f"hung up: {type(cause).__name__}")
        case _:
            text = (str(cause).splitlines() or [""])[0][:200]
            return WebError(where, f"cannot be reached: {type(cause).__name__}: {text}")


@cache
def _certificates() -> ssl.SSLContext:
    """Return a TLS context with the system's and certifi's certificates."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
