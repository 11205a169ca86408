"""HTTP client of a server, which is a gateway or a node."""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from helexa.core.errors import ApiError
from helexa.core.known_models import full_name
from helexa.core.model_source_ids import suggestion
from helexa.core.sse import EventParser
from helexa.cortex.upstream.client import Upstream
from helexa.cortex.upstream.connection_and_timeouts import (
    ConnectError,
    ReadTimeoutError,
    UpstreamError,
    UpstreamResponse,
)
from helexa.generation import environment
from helexa.generation.chat_chunks import ChunkReader
from helexa.generation.errors import (
    EngineError,
    GenerationError,
    InvalidRequestError,
    ModelNotFoundError,
    UnreachableError,
    generation_error,
)
from helexa.generation.request import Request
from helexa.generation.target import Event, OnProgress

_WIDTH = 16
_TRIES = 5
_LONGEST_PAUSE_SECONDS = 30
_LIST_SECONDS = 15.0
_MOST_LISTED = 10
_MAX_BODY_BYTES = 16 << 20
_MAX_TEXTS = 256
"""Maximum number of texts in one embeddings request."""


class ServerClient:
    """A client of one server (a gateway or a node). The base URL may end in `/v1`.

    Raises:
        InvalidRequestError: the URL or the API key is invalid.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            url_parts = urlsplit(self.url)
            is_valid = url_parts.scheme in ("http", "https") and url_parts.hostname and (url_parts.port or 1)
        except ValueError:
            is_valid = False
        if not is_valid or not (url.isascii() and url.isprintable()) or " " in url:
            raise InvalidRequestError(f"'{url}' is not a URL; write it like http://127.0.0.1:31313")
        if key and not (key.isascii() and key.isprintable()):
            raise InvalidRequestError("the API key contains characters that cannot be sent; check HELEXA_API_KEY")
        self._headers = [(b"content-type", b"application/json"), (b"user-agent", b"helexa")]
        if key:
            self._headers.append((b"authorization", b"Bearer " + key.encode()))
        self._upstream = Upstream()
        self._was_reached = False

    async def target(self, model: str | None) -> "RemoteTarget":
        """Return an object that runs requests to `model` on this server.

        If `model` is None, use the first model in the server's list that is loaded. If no model is loaded, use the
        first model in the list. If `model` is not None, the method does not check that the server has this model.

        Raises:
            UnreachableError: the server does not respond.
            GenerationError or a subclass: the server rejects the request, or has no models.
        """
        if model is None:
            models = await self.models()
            if not models:
                raise ModelNotFoundError(f"the server at {self.url} has no models; load one with `helexa load MODEL`")
            model = next((name for name, loaded in models.items() if loaded), next(iter(models)))
        elif (name := full_name(model)) != model:
            # `model` is a short name such as `llama3.2:1b`. If the server itself has a model or an alias of this name,
            # the name is not changed.
            models = await self.models()
            model = name if name in models and model not in models else model
        return RemoteTarget(self, model)

    async def explained(self, error: ModelNotFoundError, model: str) -> ModelNotFoundError:
        """Return `error` with a model name of the server that is similar to `model`.

        If no name is similar, add the first names in the server's list. Without the list, return `error` unchanged.
        """
        try:
            names = list(await self.models())
        except GenerationError:
            return error
        listed = f"the server has {', '.join(names[:_MOST_LISTED])}" if names else "the server has no models"
        hint = suggestion(model, names) or listed + (", ..." if len(names) > _MOST_LISTED else "")
        return ModelNotFoundError(f"{error}; {hint}", code=error.code, status=error.status)

    async def loaded(self, model: str | None) -> "RemoteTarget | None":
        """Return the target of `model` on this server, or None if it is not loaded.

        If `model` is None, use the first loaded model. If the server fails or does not respond, return None.
        """
        try:
            names = [name for name, loaded in (await self.models()).items() if loaded]
        except GenerationError:
            return None
        if model is None:
            return RemoteTarget(self, names[0]) if names else None
        name = model if model in names else full_name(model)
        return RemoteTarget(self, name) if name in names else None

    async def models(self) -> dict[str, bool]:
        """Return for each model of the server, by name, whether it is loaded.

        If the server does not report whether a model is loaded, the model counts as loaded.

        Raises:
            UnreachableError: the server does not respond.
            GenerationError or a subclass: the server rejects the request, or its response is invalid.
        """
        try:
            async with asyncio.timeout(_LIST_SECONDS):
                response_body = await self._read_body(await self._ask(b"GET", "/v1/models"))
        except TimeoutError:
            raise UnreachableError(
                f"{self.url} does not answer; see the log of this server, or name another one"
            ) from None
        entries = _object(response_body).get("data")
        if not isinstance(entries, list):
            raise EngineError(
                f"{self.url}/v1/models did not return a list of models; check that the URL is that of a helexa server"
            )
        named_entries = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        return {entry["id"]: entry.get("loaded") is not False for entry in named_entries}

    async def chat(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Request a streamed chat completion with the JSON `body`, and yield its chunks.

        Closing the generator cancels the request on the server. If the server is busy, the request is repeated a few
        times. The server's `Retry-After` header determines the delay before each attempt. If the last attempt fails
        too, its error is raised.

        Raises:
            GenerationError or a subclass: the server rejected the request, failed, or disconnected.
        """
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        response = await self._ask_with_retries(data)
        parser = EventParser()
        try:
            if not dict(response.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                raise EngineError(
                    f"{self.url} did not return an event stream; check that the URL is that of a helexa server"
                )
            while chunk := await response.chunk():
                for event in parser.feed(chunk):
                    if event.data == "[DONE]":
                        await response.chunk()  # read to the end, so that the connection can be reused
                        return
                    event_body = _object(event.data.encode())
                    if "error" in event_body:
                        raise self._response_error(500, event_body, {})
                    yield event_body
        except (UpstreamError, ValueError) as error:
            raise self._connection_error(error) from None
        finally:
            response.close()
        raise EngineError(
            f"the connection to {self.url} ended before the last chunk of the answer; try again", retryable=True
        )

    async def embeddings(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        """Return the embedding of each text. A busy server is asked again, as in `chat`.

        Raises:
            GenerationError or a subclass: the server rejected a request, failed, or disconnected.
        """
        vectors: list[list[float]] = []
        for start in range(0, len(texts), _MAX_TEXTS):
            batch = texts[start : start + _MAX_TEXTS]
            data = json.dumps({"model": model, "input": list(batch), "encoding_format": "base64"}).encode()
            response = await self._ask_with_retries(data, "/v1/embeddings")
            # The request asks for base64, because numbers as text would be four times as long, and slow to parse.
            vectors += self._vectors(_object(await self._read_body(response)), len(batch))
        return vectors

    def _vectors(self, body: dict[str, Any], count: int) -> list[list[float]]:
        try:
            entries = sorted(body["data"], key=lambda entry: entry["index"])
            vectors = [_vector(entry["embedding"]) for entry in entries]
        except (KeyError, TypeError, ValueError):
            vectors = []
        if len(vectors) != count:
            raise EngineError(
                f"{self.url}/v1/embeddings did not return {count} embeddings; check that the URL is "
                "that of a helexa server"
            )
        return vectors

    def close(self) -> None:
        """Close the connections to the server."""
        self._upstream.close()

    async def _ask_with_retries(self, data: bytes, path: str = "/v1/chat/completions") -> UpstreamResponse:
        for attempt in range(1, _TRIES + 1):
            try:
                return await self._ask(b"POST", path, data)
            except _BusyError as busy_error:
                if attempt == _TRIES:
                    raise busy_error.error from None
                # The pause is limited, because the `Retry-After` of a budget that is used up may be hours.
                await asyncio.sleep(min(busy_error.seconds, _LONGEST_PAUSE_SECONDS))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _ask(self, method: bytes, path: str, data: bytes = b"") -> UpstreamResponse:
        try:
            response = await self._upstream.ask(method, self.url, path, self._headers, data)
            self._was_reached = True
            if response.status == 200:
                return response
            headers = dict(response.headers)
            error = self._response_error(response.status, _object(await self._read_body(response)), headers)
        except UpstreamError as error:
            raise self._connection_error(error) from None
        retry_after = headers.get(b"retry-after", b"")
        if error.retryable and retry_after.isdigit():
            raise _BusyError(error, int(retry_after))
        raise error

    async def _read_body(self, response: UpstreamResponse) -> bytes:
        body = bytearray()
        try:
            while chunk := await response.chunk():
                body += chunk
                if len(body) > _MAX_BODY_BYTES:
                    raise EngineError(
                        f"{self.url} sent a response of more than {_MAX_BODY_BYTES} bytes; check that the URL is that "
                        "of a helexa server"
                    )
        except UpstreamError as error:
            raise self._connection_error(error) from None
        finally:
            response.close()
        return bytes(body)

    def _response_error(self, status: int, envelope: dict[str, Any], headers: dict[bytes, bytes]) -> GenerationError:
        error = envelope.get("error")
        error = error if isinstance(error, dict) else {"message": error}
        text, code = error.get("message"), error.get("code")
        message = " ".join(text.split())[:1000] if isinstance(text, str) else f"{self.url} answered HTTP {status}"
        if status == 401:
            has_key = any(name == b"authorization" for name, _ in self._headers)
            need = "the environment variable HELEXA_API_KEY"
            message = f"{message}; check {need}" if has_key else f"{self.url} needs an API key; set {need}"
        # An error event in a stream has no headers, so its code says whether a retry may succeed.
        delay = 1 if b"retry-after" in headers or code in ("service_unavailable", "rate_limit_exceeded") else None
        return generation_error(ApiError(status, code if isinstance(code, str) else None, message, retry_after=delay))

    def _connection_error(self, error: Exception) -> UnreachableError:
        match error:
            case ConnectError():
                # A retry makes sense only if the server has answered earlier, because it may be restarting.
                return UnreachableError(
                    f"no server at {self.url}; start one with `helexa up`", retryable=self._was_reached
                )
            case ReadTimeoutError():
                return UnreachableError(f"{self.url} stopped answering; see the log of this server", retryable=True)
        return UnreachableError(f"the connection to {self.url} broke: {error}; try again", retryable=True)


class _BusyError(Exception):
    """The server is busy. It sent an error response with a retry delay of `seconds`."""

    def __init__(self, error: GenerationError, seconds: int) -> None:
        super().__init__(str(error))
        self.error = error
        self.seconds = seconds


class RemoteTarget:
    """One model on a server. Its methods run requests to the model; see `Target`."""

    def __init__(self, server: ServerClient, model: str) -> None:
        self._server = server
        self.model = model

    @property
    def name(self) -> str:
        """URL of the server, for display; see `Target`."""
        return self._server.url

    @property
    def slow_reason(self) -> str | None:
        """None, because the server itself logs which kernels it uses; see `Target`."""
        return None

    @property
    def width(self) -> int:
        """Number of requests that clients should send concurrently; see `Target`."""
        return environment.number(environment.NUM_PARALLEL) or _WIDTH

    async def open(self, on_progress: OnProgress | None = None, holder: object = None) -> None:
        """Do nothing, because the server decides when to load its models; see `Target`."""

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Run a request on the server, and yield the events of the response; see `Target`."""
        reader = ChunkReader(self.model)
        chunks = self._server.chat(request.body(self.model))
        try:
            async for chunk in chunks:
                for event in reader.events(chunk):
                    yield event
        except ModelNotFoundError as error:
            raise await self._server.explained(error, self.model) from None
        finally:
            await chunks.aclose()
        yield reader.end()

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the embeddings of the texts; see `Target`."""
        try:
            return await self._server.embeddings(self.model, texts)
        except ModelNotFoundError as error:
            raise await self._server.explained(error, self.model) from None

    async def close(self, holder: object) -> None:
        """Do nothing, because the server decides when to unload its models; see `Target`."""


def _object(data: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        value = json.loads(data)
        return value if isinstance(value, dict) else {}
    return {}


def _vector(embedding: Any) -> list[float]:
    """Decode an embedding, which is a list of numbers, or float32 values in base64."""
    if isinstance(embedding, list):
        return list(map(float, embedding))
    data = base64.b64decode(embedding)
    return list(struct.unpack(f"<{len(data) // 4}f", data))
