"""A small synchronous client of the gateway: plain requests and one streamed answer."""

import json
import os
from collections.abc import Generator
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit

from helexa.cli.failure import MODEL_NOT_FOUND, UNREACHABLE, USAGE, CommandError
from helexa.cli.terminal import printable
from helexa.core.sse import EventParser

DEFAULT_URL = "http://127.0.0.1:31313"

_CONNECT_SECONDS = 5.0
_REPLY_SECONDS = 15.0
_SILENCE_SECONDS = 600.0  # a cold load may keep a stream silent that long; Ctrl-C ends the wait sooner
_LAST_BYTES_SECONDS = 2.0
_READ_BYTES = 64 * 1024
_MAX_REPLY_BYTES = 16 * 1024 * 1024


class Gateway:
    """One gateway, named by its base URL; every method opens a connection of its own."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """`url` may end in `/v1`, as client libraries want it.

        Raises:
            CommandError: the URL or the key cannot be used.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(self.url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise CommandError(f"'{url}' is not a URL: {error}", USAGE) from None
        if parts.scheme not in ("http", "https") or not self._host:
            raise CommandError(f"'{url}' is not a URL; write it like {DEFAULT_URL}", USAGE)
        self._connection = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._path = parts.path
        self._headers = {"Accept": "application/json, text/event-stream", "User-Agent": "helexa"}
        if key:
            if not (key.isascii() and key.isprintable()):
                raise CommandError("the API key contains characters that cannot be sent; check HELEXA_API_KEY", USAGE)
            self._headers["Authorization"] = f"Bearer {key}"

    @classmethod
    def from_environment(cls, url: str | None) -> Self:
        """The gateway at `url`, else at `HELEXA_BASE_URL`, else on this machine; the key is `HELEXA_API_KEY`."""
        return cls(url or os.environ.get("HELEXA_BASE_URL") or DEFAULT_URL, os.environ.get("HELEXA_API_KEY"))

    def get(self, path: str, patience: float = _REPLY_SECONDS) -> Any:
        """The JSON at `path`; `patience` is how many seconds the reply may take.

        Raises:
            CommandError: unreachable, refused, or not JSON.
        """
        with (
            closing(self._connect(patience)) as connection,
            self._send(connection, "GET", path, None, patience) as response,
        ):
            try:
                return json.loads(self._read(response))
            except (ValueError, RecursionError):
                raise CommandError(f"{self.url}{path} did not answer with JSON; is this a helexa gateway?") from None

    def models(self, patience: float = _REPLY_SECONDS) -> list[dict[str, Any]]:
        """The entries of `/v1/models`; raises what `get` raises."""
        reply = self.get("/v1/models", patience)
        entries = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(entries, list):
            raise CommandError(f"{self.url}/v1/models did not answer with a list of models")
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    def chat(self, request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of one streamed chat completion; closing the generator ends the answer on the server.

        Raises:
            CommandError: unreachable, refused, or broken off.
        """
        body = json.dumps({**request, "stream": True, "stream_options": {"include_usage": True}}).encode()
        path = "/v1/chat/completions"
        with (
            closing(self._connect()) as connection,
            self._send(connection, "POST", path, body, _SILENCE_SECONDS) as response,
        ):
            if not (response.getheader("Content-Type") or "").startswith("text/event-stream"):
                raise CommandError(f"{self.url} did not answer with a stream; is this a helexa gateway?")
            for data in self._events(response):
                if data == "[DONE]":
                    self._finish(connection, response)
                    return
                chunk = _object(data)
                if "error" in chunk:
                    raise CommandError(_message(chunk) or "the answer failed")
                yield chunk
            raise CommandError("the answer broke off: the connection ended before it was complete")

    def _connect(self, patience: float = _CONNECT_SECONDS) -> HTTPConnection:
        connection = self._connection(self._host or "", self._port, timeout=min(patience, _CONNECT_SECONDS))
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            connection.close()
            reason = "" if isinstance(error, ConnectionRefusedError) else f" ({error})"
            raise CommandError(f"no gateway at {self.url}{reason}; start one with `helexa up`", UNREACHABLE) from None
        return connection

    def _send(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None, patience: float
    ) -> HTTPResponse:
        headers = self._headers | ({"Content-Type": "application/json"} if body else {})
        if connection.sock:
            connection.sock.settimeout(patience)
        try:
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            self._lost(error)
        if response.status != 200:
            self._refused(response)
        return response

    def _read(self, response: HTTPResponse) -> bytes:
        try:
            body = response.read(_MAX_REPLY_BYTES + 1)
        except (OSError, HTTPException) as error:
            self._lost(error)
        if len(body) > _MAX_REPLY_BYTES:
            raise CommandError(f"{self.url} sent more than {_MAX_REPLY_BYTES} bytes")
        return body

    def _events(self, response: HTTPResponse) -> Generator[str, None, None]:
        parser = EventParser()
        try:
            while data := response.read1(_READ_BYTES):
                for event in parser.feed(data):
                    yield event.data
        except (OSError, HTTPException, ValueError) as error:
            self._lost(error)

    def _finish(self, connection: HTTPConnection, response: HTTPResponse) -> None:
        """Read to the end of a stream that has said it is done; leaving earlier would look like giving up."""
        if connection.sock:
            connection.sock.settimeout(_LAST_BYTES_SECONDS)
        with suppress(OSError, HTTPException):
            response.read1(1)

    def _refused(self, response: HTTPResponse) -> NoReturn:
        with response:
            envelope = _object(self._read(response))
        message = _message(envelope) or f"{self.url} answered HTTP {response.status}"
        error = envelope.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        wait = response.getheader("Retry-After") or ""
        if wait.isdecimal():
            message += f" (try again in {wait} s)"
        raise CommandError(message, MODEL_NOT_FOUND if code == "model_not_found" else 1)

    def _lost(self, error: Exception) -> NoReturn:
        if isinstance(error, TimeoutError):
            raise CommandError(f"{self.url} stopped answering") from None
        raise CommandError(f"the connection to {self.url} broke: {error or type(error).__name__}") from None


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
