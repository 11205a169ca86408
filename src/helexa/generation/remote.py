"""HTTP client of a server, which is a gateway or a node."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

from helexa.core.errors import ApiError
from helexa.core.sse import EventParser
from helexa.cortex.upstream.client import Upstream
from helexa.cortex.upstream.connection import UpstreamResponse
from helexa.cortex.upstream.errors import ConnectError, ReadTimeoutError, UpstreamError
from helexa.generation import environment
from helexa.generation.completion import Delta, FinishReason, Usage
from helexa.generation.errors import (
    EngineError,
    GenerationError,
    InvalidRequestError,
    ModelNotFoundError,
    UnreachableError,
    generation_error,
)
from helexa.generation.request import Request
from helexa.generation.target import End, Event, OnProgress

_WIDTH = 16
_TRIES = 5
_LONGEST_PAUSE_SECONDS = 30
_LIST_SECONDS = 15.0
_MAX_BODY_BYTES = 16 << 20
_REASONS = ("stop", "length", "tool_calls")


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
        first model in the list.

        Raises:
            UnreachableError: the server does not respond.
            GenerationError: the server rejects the request, or has no models.
        """
        if model is None:
            models = await self.models()
            if not models:
                raise ModelNotFoundError(f"the server at {self.url} has no models")
            model = next((name for name, loaded in models.items() if loaded), next(iter(models)))
        return RemoteTarget(self, model)

    async def loaded(self, model: str | None) -> "RemoteTarget | None":
        """Return an object that runs requests to `model` on this server, or None if `model` is not loaded there.

        If `model` is None, use the first loaded model. If the server fails or does not respond, return None.
        """
        try:
            names = [name for name, loaded in (await self.models()).items() if loaded]
        except GenerationError:
            return None
        if model is None:
            model = names[0] if names else None
        return RemoteTarget(self, model) if model is not None and model in names else None

    async def models(self) -> dict[str, bool]:
        """Return the models of the server, as a dict from model id to True if the model is loaded, else False.

        Raises:
            UnreachableError: the server does not respond.
            GenerationError: the server rejects the request, or its response is invalid.
        """
        try:
            async with asyncio.timeout(_LIST_SECONDS):
                response_body = await self._read_body(await self._ask(b"GET", "/v1/models"))
        except TimeoutError:
            raise UnreachableError(f"{self.url} does not answer") from None
        entries = _object(response_body).get("data")
        if not isinstance(entries, list):
            raise EngineError(f"{self.url}/v1/models did not return a list of models; is this a helexa server?")
        named_entries = [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        return {entry["id"]: entry.get("loaded") is not False for entry in named_entries}

    async def chat(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Request a streamed chat completion with the JSON `body`, and yield its chunks.

        Closing the generator cancels the request on the server. If the server is busy, the request is repeated a few
        times. The server's `Retry-After` header determines the delay before each attempt. If the last attempt fails
        too, its error is raised.

        Raises:
            GenerationError: the server rejected the request, failed, or disconnected.
        """
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        response = await self._ask_with_retries(data)
        parser = EventParser()
        try:
            if not dict(response.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
                raise EngineError(f"{self.url} did not return an event stream; is this a helexa server?")
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
        raise EngineError("the answer broke off: the connection ended before the last chunk", retryable=True)

    def close(self) -> None:
        """Close the connections to the server."""
        self._upstream.close()

    async def _ask_with_retries(self, data: bytes) -> UpstreamResponse:
        for attempt in range(1, _TRIES + 1):
            try:
                return await self._ask(b"POST", "/v1/chat/completions", data)
            except _BusyError as busy_error:
                if attempt == _TRIES:
                    raise busy_error.error from None
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
                    raise EngineError(f"{self.url} sent a response of more than {_MAX_BODY_BYTES} bytes")
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
        delay = 1 if b"retry-after" in headers or code in ("service_unavailable", "rate_limit_exceeded") else None
        return generation_error(ApiError(status, code if isinstance(code, str) else None, message, retry_after=delay))

    def _connection_error(self, error: Exception) -> UnreachableError:
        match error:
            case ConnectError():
                # A server that answered earlier may be restarting.
                return UnreachableError(
                    f"no server at {self.url}; start one with `helexa up`", retryable=self._was_reached
                )
            case ReadTimeoutError():
                return UnreachableError(f"{self.url} stopped answering", retryable=True)
        return UnreachableError(f"the connection to {self.url} broke: {error}", retryable=True)


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
    def width(self) -> int:
        """Number of requests that clients should send concurrently; see `Target`."""
        return environment.number(environment.NUM_PARALLEL) or _WIDTH

    async def open(self, on_progress: OnProgress | None = None, holder: object = None) -> None:
        """Do nothing, because the server decides when to load its models; see `Target`."""

    async def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Run a request on the server, and yield the events of the response; see `Target`."""
        reason: FinishReason | None = None
        usage: dict[str, Any] = {}
        chunks = self._server.chat(request.body(self.model))
        try:
            async for chunk in chunks:
                usage = chunk["usage"] if isinstance(chunk.get("usage"), dict) else usage
                choice = _first(chunk.get("choices"))
                finish_reason = choice.get("finish_reason")
                reason = cast(FinishReason, finish_reason) if finish_reason in _REASONS else reason
                delta = choice.get("delta")
                for field, is_reasoning in (("reasoning_content", True), ("content", False)):
                    text = delta.get(field) if isinstance(delta, dict) else None
                    if isinstance(text, str) and text:
                        yield Delta(text, thought=is_reasoning)
        finally:
            await chunks.aclose()
        if reason is None:
            raise EngineError("the answer ended without a finish reason", retryable=True)
        yield _end(reason, self.model, usage)

    async def close(self, holder: object) -> None:
        """Do nothing, because the server decides when to unload its models; see `Target`."""


def _end(reason: FinishReason, model: str, usage: dict[str, Any]) -> End:
    prompt, completion, timing = (
        _dict(usage.get(name)) for name in ("prompt_tokens_details", "completion_tokens_details", "helexa_timing")
    )
    prefill, decode = (timing.get(name) for name in ("prefill_ms", "decode_ms"))
    return End(
        reason=reason,
        model=model,
        usage=Usage(
            prompt=_count(usage.get("prompt_tokens")),
            cached=_count(prompt.get("cached_tokens")),
            completion=_count(usage.get("completion_tokens")),
            reasoning=_count(completion.get("reasoning_tokens")),
        ),
        prefill_s=prefill / 1000 if isinstance(prefill, int | float) else None,
        decode_s=decode / 1000 if isinstance(decode, int | float) else None,
    )


def _object(data: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        return _dict(json.loads(data))
    return {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(choices: Any) -> dict[str, Any]:
    return _dict(choices[0]) if isinstance(choices, list) and choices else {}


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
