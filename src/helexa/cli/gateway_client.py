"""A small synchronous HTTP client of the gateway."""

import json
import os
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from ssl import SSLCertVerificationError
from typing import TYPE_CHECKING, Any, NoReturn, Self
from urllib.parse import urlsplit

from helexa.cli.terminal_output_and_errors import MODEL_NOT_FOUND, UNREACHABLE, USAGE, CommandError, printable

if TYPE_CHECKING:
    from helexa.core.node_reports import NodeReport

DEFAULT_URL = "http://127.0.0.1:31313"

_CONNECT_SECONDS = 5.0
_REPLY_SECONDS = 15.0
_MAX_REPLY_BYTES = 16 * 1024 * 1024


class NoAnswerError(CommandError):
    """The connection broke, or the server did not answer in time."""


class Gateway:
    """An HTTP client of one gateway or node. Every request opens a new connection.

    A request's `CommandError` has the exit code `UNREACHABLE` (no connection), `MODEL_NOT_FOUND` or 1.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        """Store the base URL of the gateway, which may end in `/v1`, and the API key.

        Raises:
            CommandError: the URL or the API key is invalid.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            url_parts = urlsplit(self.url)
            self._host, self._port = url_parts.hostname, url_parts.port
        except ValueError as error:
            raise CommandError(f"'{url}' is not a URL: {error}; write it like {DEFAULT_URL}", USAGE) from None
        if url_parts.scheme not in ("http", "https") or not self._host:
            raise CommandError(f"'{url}' is not a URL; write it like {DEFAULT_URL}", USAGE)
        self._connection = HTTPSConnection if url_parts.scheme == "https" else HTTPConnection
        self._path = url_parts.path
        self._headers = {"Accept": "application/json", "User-Agent": "helexa"}
        if key:
            if not (key.isascii() and key.isprintable()):
                raise CommandError(
                    "the API key contains characters other than printable ASCII; check HELEXA_API_KEY", USAGE
                )
            self._headers["Authorization"] = f"Bearer {key}"

    @classmethod
    def from_environment(cls, url: str | None) -> Self:
        """Return a client of the gateway at `url`.

        If `url` is None, the environment variable `HELEXA_BASE_URL` is used, or else the default URL on this machine.
        The environment variable `HELEXA_API_KEY` contains the API key.
        """
        return cls(url or os.environ.get("HELEXA_BASE_URL") or DEFAULT_URL, os.environ.get("HELEXA_API_KEY"))

    def get(self, path: str, timeout: float = _REPLY_SECONDS) -> Any:
        """Send a GET request for `path`, and return the response as parsed JSON.

        Args:
            path: URL path, such as `/v1/models`.
            timeout: timeout in seconds.

        Raises:
            CommandError: the gateway is unreachable, rejects the request, or returns no JSON.
        """
        with closing(self._connect(timeout)) as connection, self._ask(connection, path, timeout) as response:
            try:
                return json.loads(self._read(response))
            except (ValueError, RecursionError):
                raise CommandError(
                    f"{self.url}{path} did not answer with JSON; check that the URL is that of a helexa gateway"
                ) from None

    def post(self, path: str, body: object, timeout: float) -> Any:
        """Send a POST request with JSON and return the parsed response.

        Args:
            path: URL path, such as `/v1/chat/completions`.
            body: value that can be written as JSON.
            timeout: timeout in seconds.

        Raises:
            CommandError: the server is unreachable, rejects the request, or returns no JSON.
        """
        content = json.dumps(body).encode()
        with closing(self._connect(timeout)) as connection, self._ask(connection, path, timeout, content) as response:
            try:
                return json.loads(self._read(response))
            except (ValueError, RecursionError):
                raise CommandError(
                    f"{self.url}{path} did not answer with JSON; check that this is a helexa gateway"
                ) from None

    def delete(self, path: str, timeout: float) -> Any:
        """Send a DELETE request for `path`, and return the response's JSON object, or {}.

        A `CommandError` means that the gateway is unreachable, or rejects the request.
        """
        with (
            closing(self._connect(timeout)) as connection,
            self._ask(connection, path, timeout, method="DELETE") as response,
        ):
            return _object(self._read(response))

    def unready_reason(self, timeout: float) -> str | None:
        """Return why the server is not ready, or None if it is ready (`/health/ready`).

        Args:
            timeout: timeout in seconds, of which at most `_REPLY_SECONDS` are used.

        Raises:
            CommandError: the server is unreachable, does not answer in time, or is not a server of helexa.
        """
        with closing(self._connect(timeout)) as connection:
            response = self._send(connection, "/health/ready", min(timeout, _REPLY_SECONDS), None)
            with response:
                report = _object(self._read(response))
        components = report.get("components")
        # Other servers, and proxies, may answer 503, too. Only helexa's answer has components.
        if response.status not in (200, 503) or not isinstance(components, dict):
            raise CommandError(
                f"{self.url}/health/ready sent no health report; check that the URL is that of a helexa server"
            )
        if response.status == 200:
            return None
        reasons = [part.get("reason") for part in components.values() if isinstance(part, dict)]
        return printable("; ".join(reason for reason in reasons if isinstance(reason, str))) or "no reason given"

    def models(self, timeout: float = _REPLY_SECONDS) -> list[dict[str, Any]]:
        """Return the entries of the gateway's model list (`/v1/models`).

        `timeout` is in seconds.

        Raises:
            CommandError: the gateway is unreachable, rejects the request, or returns no list of models.
        """
        response = self.get("/v1/models", timeout)
        entries = response.get("data") if isinstance(response, dict) else None
        if not isinstance(entries, list):
            raise CommandError(
                f"{self.url}/v1/models did not answer with a list of models; check that this is a helexa gateway"
            )
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    def node_reports(self) -> "list[NodeReport]":
        """Return the gateway's reports about all its nodes (`/api/nodes`).

        Raises:
            CommandError: the gateway is unreachable, rejects the request, or is not a helexa gateway.
        """
        from pydantic import TypeAdapter, ValidationError  # slow to import, and most commands need no reports

        from helexa.core.node_reports import NodeReport

        response = self.get("/api/nodes")
        try:
            return TypeAdapter(list[NodeReport]).validate_python(response["nodes"])
        except (KeyError, TypeError, ValidationError):
            raise CommandError(
                f"{self.url}/api/nodes sent no list of nodes; check that the URL is that of a helexa gateway"
            ) from None

    def _connect(self, timeout: float = _CONNECT_SECONDS) -> HTTPConnection:
        connection = self._connection(self._host or "", self._port, timeout=min(timeout, _CONNECT_SECONDS))
        try:
            connection.connect()
        except SSLCertVerificationError as error:
            connection.close()
            message = f"the certificate of {self.url} is not trusted: {error.verify_message}"
            raise CommandError(
                f"{message}; set SSL_CERT_FILE to a file with the CA of the server", UNREACHABLE
            ) from None
        except (OSError, UnicodeError) as error:
            connection.close()
            reason = "" if isinstance(error, ConnectionRefusedError) else f" ({error})"
            raise CommandError(f"no gateway at {self.url}{reason}; start one with `helexa up`", UNREACHABLE) from None
        return connection

    def _send(
        self, connection: HTTPConnection, path: str, timeout: float, content: bytes | None, method: str = "GET"
    ) -> HTTPResponse:
        """Send a request, and return its response. With `content`, the method is POST."""
        if connection.sock:
            connection.sock.settimeout(timeout)
        headers = self._headers if content is None else self._headers | {"Content-Type": "application/json"}
        try:
            connection.request(method if content is None else "POST", self._path + path, content, headers)
            return connection.getresponse()
        except (OSError, HTTPException) as error:
            self._lost(error)

    def _ask(
        self, connection: HTTPConnection, path: str, timeout: float, content: bytes | None = None, method: str = "GET"
    ) -> HTTPResponse:
        response = self._send(connection, path, timeout, content, method)
        if response.status != 200:
            self._raise_error(response)
        return response

    def _read(self, response: HTTPResponse) -> bytes:
        try:
            body = response.read(_MAX_REPLY_BYTES + 1)  # one byte more than the limit shows that the limit is exceeded
        except (OSError, HTTPException) as error:
            self._lost(error)
        if len(body) > _MAX_REPLY_BYTES:
            raise CommandError(
                f"{self.url} sent more than {_MAX_REPLY_BYTES} bytes; check that the URL is that of a helexa server"
            )
        return body

    def _raise_error(self, response: HTTPResponse) -> NoReturn:
        with response:
            envelope = _object(self._read(response))
        message = _message(envelope) or f"{self.url} answered HTTP {response.status}"
        if response.status == 401:
            has_key = "Authorization" in self._headers
            message = (
                f"{message}; check HELEXA_API_KEY" if has_key else f"{self.url} needs an API key; set HELEXA_API_KEY"
            )
        error = envelope.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        wait = response.getheader("Retry-After") or ""
        if wait.isdecimal():
            message += f" (try again in {wait} s)"
        raise CommandError(message, MODEL_NOT_FOUND if code == "model_not_found" else 1)

    def _lost(self, error: Exception) -> NoReturn:
        if isinstance(error, TimeoutError):
            raise NoAnswerError(f"{self.url} did not answer in time; try again, or see the log of the server") from None
        reason = error or type(error).__name__
        raise NoAnswerError(f"the connection to {self.url} broke ({reason}); try again") from None


def _object(data: str | bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict):
            return value
    return {}


def _message(envelope: dict[str, Any]) -> str:
    error = envelope.get("error")
    text = error.get("message") if isinstance(error, dict) else error
    return printable(" ".join(text.split()))[:1000] if isinstance(text, str) else ""
