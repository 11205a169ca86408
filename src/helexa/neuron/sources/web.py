"""Sites that serve files over HTTP, asked by way of the user's proxies; only the site itself sees its token."""

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
_CHUNK_BYTES = 1 << 16  # larger ones only cost memory: encrypted connections give 16 KiB at a time
_TEXT_SECONDS = 60.0
_PASSING_STATUSES = (408, 425, 429)


class WebError(Exception):
    """A site did not answer, or not with what was asked for.

    Attributes:
        where: the site, without anything that could be a secret.
        status: its HTTP status, None if there was none.
        code: what the Hugging Face Hub calls the reason, such as `GatedRepo`, else empty.
        retry_after: seconds that it asks to wait, None if it does not.
        passing: whether trying again may help.
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
    """What a site sends; leave the block to hang up.

    Attributes:
        where: the site that sends it, which may be another than the one asked.
        length: bytes that it will send, None if it does not say.
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
        """Which part of the file this is; None: all of it."""
        return self._response.headers.get("Content-Range", "") if self._response.status == 206 else None

    def chunks(self) -> Iterator[bytes]:
        """The body, piece by piece as it arrives.

        Raises:
            WebError: nothing came for too long, or the connection broke.
        """
        done = 0
        # Not every version of http.client counts, and one byte too many would be waited for in vain.
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
        """The body as a whole.

        Raises:
            WebError: as `chunks`, or it is longer than `limit` bytes, or takes too long although there is no silence.
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
    """One server of files.

    Args:
        url: its base URL.
        token: sent as bearer token to it, and to nobody it redirects to.
        patience: seconds after which silence counts as a failure.
    """

    def __init__(self, url: str, token: str | None, patience: float) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._patience = patience
        self._opener = OpenerDirector()
        # Named one by one: the usual opener would also follow a site to ftp: and file: addresses.
        for handler in (ProxyHandler(), _Http(), _Https()):
            self._opener.add_handler(handler)
        for handler in (UnknownHandler(), HTTPDefaultErrorHandler(), HTTPErrorProcessor()):
            self._opener.add_handler(handler)

    @property
    def url(self) -> str:
        """Its base URL."""
        return self._url

    @property
    def has_token(self) -> bool:
        """Whether requests carry a token."""
        return self._token is not None

    def get(self, path: str, start: int = 0, stop: int | None = None, patience: float | None = None) -> Answer:
        """Ask for a file, from byte `start` on, up to byte `stop` or its end.

        Raises:
            WebError: it cannot be reached, or refuses.
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
            except ValueError:  # which quotes what must not be shown
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
    """Scheme, host and port of `url`: what may be shown of it. Empty where `url` is none."""
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
    """Those of the system, and for systems that have none those that came with us."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
