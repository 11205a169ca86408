"""Connects to one endpoint with the client of an SDK, limits response sizes, and converts errors."""

import asyncio
import importlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import httpx2

from helexa.acp.config import Endpoint
from helexa.acp.json_line import sendable
from helexa.acp.providers.api_format import Json
from helexa.acp.providers.provider import ProviderError
from helexa.acp.providers.rejection import provider_error

MAX_BYTES = 64 << 20
"""Largest size of one response in bytes. Larger responses come from broken servers."""

IDLE_SECONDS = 600.0
"""Seconds without a received byte before a request fails. Gateways may load a model first."""

_TIMEOUT = httpx2.Timeout(IDLE_SECONDS, connect=10.0)
_PLACEHOLDER = "none"  # never sent; without a key, the SDK would read a key from the environment
_CLASSES = {"openai": "AsyncOpenAI", "anthropic": "AsyncAnthropic"}


class Connection:
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
        """Send a streaming POST request and yield the events of the response stream as JSON objects.

        Raises:
            ProviderError: the endpoint rejected the request, closed the stream early, or sent invalid data.
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
            ProviderError: the endpoint rejected the request or sent invalid data.
        """
        with self._failures(lambda: False):
            return await self._client.get(path, cast_to=object)

    async def has_route(self, path: str) -> bool:
        """Send a POST request with an empty body, and return whether the endpoint has a route at `path`.

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
                "interrupted" if begun() else "unavailable", f"{name} did not answer in time"
            ) from error
        except _ResponseTooLarge as error:
            raise ProviderError("invalid", f"{name} sent more than {MAX_BYTES >> 20} MiB") from error
        except (sdk.APIConnectionError, httpx2.HTTPError, httpx2.StreamError) as error:
            if isinstance(error.__cause__, _ResponseTooLarge):
                raise ProviderError("invalid", f"{name} sent more than {MAX_BYTES >> 20} MiB") from error
            if begun():
                raise ProviderError("interrupted", f"{name} broke off in the middle of the answer") from error
            raise ProviderError("unavailable", f"{name} cannot be reached at {self._endpoint.base_url}") from error
        except sdk.APIError as error:  # an error event within a stream
            raise provider_error(name, 200, error.body or error.message, {}, self._secrets) from error
        except (ValueError, httpx2.InvalidURL) as error:
            raise ProviderError("invalid", f"{name} sent an invalid response") from error


async def connect(endpoint: Endpoint, sdk: Literal["openai", "anthropic"]) -> Connection:
    """Return a connection to an endpoint. The SDK is imported in a thread, so the event loop is not blocked."""
    return Connection(endpoint, await asyncio.to_thread(importlib.import_module, sdk))


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
                raise _ResponseTooLarge("the response is too large")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def _http_client(endpoint: Endpoint, custom_headers: str) -> httpx2.AsyncClient:
    """Return an HTTP client that sends the endpoint's configured headers and limits the size of responses.

    The client removes the headers that the SDK adds from environment variables.

    Args:
        endpoint: the endpoint and its headers.
        custom_headers: name of the environment variable from which the SDK reads additional headers.
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
                "the response is compressed, although the request forbids compression", request=response.request
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
