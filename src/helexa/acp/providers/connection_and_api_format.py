"""HTTP connection to an LLM endpoint, and the interface of API formats.

An API format only converts requests and responses. `EndpointConnection` sends and receives them.
"""

import asyncio
import importlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, cast

import httpx2

from helexa.acp.config import Endpoint
from helexa.acp.conversation_and_events import sendable
from helexa.acp.providers.error_responses import provider_error
from helexa.acp.providers.requests_and_events import ModelEvent, ModelRequest, ProviderError

Json = dict[str, Any]


class Reader(Protocol):
    """Interface of an API format's reader: converts stream events to model events."""

    def feed(self, event: Json) -> Iterator[ModelEvent]:
        """Yield the model events that correspond to one stream event.

        An invalid stream event yields no model events.

        Raises:
            ProviderError: the event reports an error of the endpoint.
        """
        ...

    def end(self) -> Iterator[ModelEvent]:
        """Yield the last model events after the end of the stream.

        If the response is complete, yield `Usage` (if the endpoint reported it) and `End`. If the stream broke off,
        yield nothing.
        """
        ...


class ApiFormat(Protocol):
    """Interface of an API format: URL paths, request bodies and responses."""

    path: str  # URL path of requests, relative to the base URL
    models_path: str  # URL path of the model list, relative to the base URL
    optional: tuple[str, ...]  # keys of the request body that can be omitted if an endpoint rejects them
    # whether the response's text may contain reasoning and tool calls between markers such as `<think>`, because some
    # servers do not remove reasoning and tool calls from the text
    leaks_markers: bool

    def body(self, request: ModelRequest, endpoint: str, rejected: frozenset[str]) -> Json:
        """Return the JSON body of the HTTP request for a model request.

        Args:
            endpoint: name of the endpoint. Data from earlier responses is sent back only to the endpoint that sent it.
            rejected: keys to omit, because the endpoint rejected them.
        """
        ...

    def headers(self, request: ModelRequest) -> dict[str, str]:
        """Return the HTTP headers that this API format adds for `request`."""
        ...

    def reader(self, request: ModelRequest, endpoint: str) -> Reader:
        """Return a new reader of the response to `request`."""
        ...


def text_of(value: Any) -> str:
    """Return `value` from an endpoint's JSON if it is a string, else an empty string.

    Lone surrogates are replaced by U+FFFD.
    """
    if not isinstance(value, str):
        return ""
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def count_of(value: Any) -> int:
    """Return `value` from an endpoint's JSON if it is a positive integer, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def object_of(value: Any) -> Json:
    """Return `value` from an endpoint's JSON if it is an object, else an empty object."""
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """Return `value` from an endpoint's JSON if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


MAX_BYTES = 64 << 20
"""Largest size of one response in bytes.

Larger responses come from broken servers.
"""

IDLE_SECONDS = 600.0
"""A request fails after this number of seconds without a received byte.

The limit is long, because a gateway may load the model before it sends the first byte.
"""

_TIMEOUT = httpx2.Timeout(IDLE_SECONDS, connect=10.0)
_PLACEHOLDER = "none"  # never sent; without a key, the SDK would read a key from the environment
_CLASSES = {"openai": "AsyncOpenAI", "anthropic": "AsyncAnthropic"}


class EndpointConnection:
    """A connection to one endpoint through the client of the OpenAI or Anthropic SDK.

    Requests and responses are plain JSON. They are not validated with the SDK's types, because compatible servers send
    fields that these types do not have. All failures are raised as `ProviderError`.
    """

    def __init__(self, endpoint: Endpoint, sdk: Any) -> None:
        self._endpoint = endpoint
        self._sdk = sdk
        self._secrets = (endpoint.api_key or "", *endpoint.headers.values())
        self._client = getattr(sdk, _CLASSES[sdk.__name__])(
            api_key=endpoint.api_key or _PLACEHOLDER,
            base_url=endpoint.base_url,
            max_retries=0,
            http_client=_http_client(endpoint, f"{sdk.__name__.upper()}_CUSTOM_HEADERS"),
        )

    async def events(self, path: str, body: Json, headers: dict[str, str]) -> AsyncGenerator[Json, None]:
        """Send a streaming POST request and yield the events as JSON objects.

        Raises:
            ProviderError: the endpoint is unreachable, rejected the request, ended the stream early, or sent bad data.
        """
        begun = False
        with self._failures(lambda: begun):
            stream = await self._client.post(
                path,
                body=sendable(body),
                cast_to=object,
                options={"headers": headers},
                stream=True,
                stream_cls=self._sdk.AsyncStream[object],
            )
            async with stream:
                async for event in stream:
                    begun = True
                    if isinstance(event, dict):
                        yield cast(Json, event)

    async def get(self, path: str) -> Any:
        """Send a GET request and return the response as parsed JSON.

        Raises:
            ProviderError: the endpoint is unreachable, rejected the request, or sent invalid data.
        """
        with self._failures(lambda: False):
            return await self._client.get(path, cast_to=object)

    async def has_route(self, path: str) -> bool:
        """Send an empty POST to `path`, and return whether the endpoint has this route.

        Raises:
            ProviderError: the endpoint cannot be reached or is unavailable.
        """
        try:
            with self._failures(lambda: False):
                await self._client.post(path, body={}, cast_to=object)
        except ProviderError as error:
            if error.kind == "unavailable":
                raise
            status = getattr(error.__cause__, "status_code", None)
            return status is not None and (status not in (404, 405) or error.kind == "model_not_found")
        return True

    async def close(self) -> None:
        """Close the connections to the endpoint."""
        await self._client.close()

    @contextmanager
    def _failures(self, begun: Callable[[], bool]) -> Iterator[None]:
        name, sdk = self._endpoint.name, self._sdk
        try:
            yield
        except sdk.APIStatusError as error:
            status = error.status_code
            body = error.body if status < 300 else _json(error.response.content)
            raise provider_error(name, status, body, error.response.headers, self._secrets) from error
        except (sdk.APITimeoutError, httpx2.TimeoutException) as error:
            raise ProviderError(
                "interrupted" if begun() else "unavailable",
                f"{name} did not answer in time; try again or choose another model",
            ) from error
        except _ResponseTooLarge as error:
            raise ProviderError(
                "invalid", f"{name} sent more than {MAX_BYTES >> 20} MiB in one response; choose another model"
            ) from error
        except (sdk.APIConnectionError, httpx2.HTTPError, httpx2.StreamError) as error:
            if isinstance(error.__cause__, _ResponseTooLarge):
                raise ProviderError(
                    "invalid", f"{name} sent more than {MAX_BYTES >> 20} MiB in one response; choose another model"
                ) from error
            if begun():
                raise ProviderError(
                    "interrupted", f"{name} closed the connection during the answer; send the prompt again"
                ) from error
            raise ProviderError(
                "unavailable",
                f"{name} cannot be reached at {self._endpoint.base_url}; check that this server "
                "runs and that base_url is correct",
            ) from error
        except sdk.APIError as error:  # an error event within a stream
            raise provider_error(name, 200, error.body or error.message, {}, self._secrets) from error
        except (ValueError, httpx2.InvalidURL) as error:
            raise ProviderError("invalid", f"{name} sent an invalid response; check base_url and wire_api") from error


async def connect(endpoint: Endpoint, sdk: Literal["openai", "anthropic"]) -> EndpointConnection:
    """Return an HTTP connection to `endpoint` through the client of the given SDK."""
    # The SDK is imported in a thread, so the event loop is not blocked.
    return EndpointConnection(endpoint, await asyncio.to_thread(importlib.import_module, sdk))


class _ResponseTooLarge(httpx2.ReadError):
    pass


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        remaining_bytes = MAX_BYTES
        async for chunk in self._stream:
            remaining_bytes -= len(chunk)
            if remaining_bytes < 0:
                raise _ResponseTooLarge(f"the endpoint's response has more than {MAX_BYTES >> 20} MiB")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def _http_client(endpoint: Endpoint, custom_headers: str) -> httpx2.AsyncClient:
    """Return an HTTP client with the endpoint's headers and a response limit.

    `custom_headers` is the name of the environment variable from which the SDK adds headers to each request. The client
    removes these headers, because only helexa-acp's configuration determines the headers.
    """
    removed = [line.partition(":")[0].strip() for line in os.environ.get(custom_headers, "").splitlines()]
    removed += ["openai-organization", "openai-project"]
    if not endpoint.api_key:
        removed.append("authorization")

    async def set_headers(request: httpx2.Request) -> None:
        for name in removed:
            request.headers.pop(name, None)
        request.headers.update({"accept-encoding": "identity", "user-agent": "helexa-acp"} | endpoint.headers)

    async def limit_response(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError(
                f"{endpoint.name} sent a compressed response, although the request forbids compression; turn off "
                "compression in the server or its proxy",
                request=response.request,
            )
        response.stream = _LimitedStream(cast(httpx2.AsyncByteStream, response.stream))

    hooks: dict[str, list[Any]] = {"request": [set_headers], "response": [limit_response]}
    return httpx2.AsyncClient(timeout=_TIMEOUT, follow_redirects=False, event_hooks=hooks)


def _json(content: bytes) -> Any:
    text = content.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
