"""One connection to an endpoint through its SDK: answers as JSON, failures as ProviderError, nothing without bound."""

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
from helexa.acp.providers.provider import ProviderError
from helexa.acp.providers.refusal import refusal
from helexa.acp.providers.wire import Json

MOST_BYTES = 64 << 20
"""Of one answer: far beyond what a model says, and an end to what a broken server sends."""

IDLE_SECONDS = 600.0
"""Without a byte. Long, as a gateway may be loading the model."""

_TIMEOUT = httpx2.Timeout(IDLE_SECONDS, connect=10.0)
_PLACEHOLDER = "none"  # without a key the SDKs would take another service's from the environment; it is never sent
_CLASSES = {"openai": "AsyncOpenAI", "anthropic": "AsyncAnthropic"}


class Connection:
    """An endpoint by way of the client of an official SDK.

    Requests go out as they are given and answers are read as they come: endpoints that only resemble the original send
    what its types do not foresee.
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
        """Ask for a stream; its events as JSON objects.

        Raises:
            ProviderError: the endpoint refused, broke off, or sent something else.
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
        """What is at a path, as JSON.

        Raises:
            ProviderError: the endpoint refused or sent something else.
        """
        with self._failures(lambda: False):
            return await self._client.get(path, cast_to=object)

    async def has_route(self, path: str) -> bool:
        """Whether an empty question is refused for being empty, not for where it was asked.

        Raises:
            ProviderError: the endpoint cannot be reached or is out of order.
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
        """Close its sockets."""
        await self._client.close()

    @contextmanager
    def _failures(self, begun: Callable[[], bool]) -> Iterator[None]:
        name, sdk = self._endpoint.name, self._sdk
        try:
            yield
        except sdk.APIStatusError as error:
            status = error.status_code
            body = error.body if status < 300 else _json(error.response.content)
            raise refusal(name, status, body, error.response.headers, self._secrets) from error
        except (sdk.APITimeoutError, httpx2.TimeoutException) as error:
            raise ProviderError(
                "interrupted" if begun() else "unavailable", f"{name} did not answer in time"
            ) from error
        except _TooMuch as error:
            raise ProviderError("invalid", f"{name} sent more than {MOST_BYTES >> 20} MiB") from error
        except (sdk.APIConnectionError, httpx2.HTTPError, httpx2.StreamError) as error:
            if isinstance(error.__cause__, _TooMuch):
                raise ProviderError("invalid", f"{name} sent more than {MOST_BYTES >> 20} MiB") from error
            if begun():
                raise ProviderError("interrupted", f"{name} broke off in the middle of the answer") from error
            raise ProviderError("unavailable", f"{name} cannot be reached at {self._endpoint.base_url}") from error
        except sdk.APIError as error:  # an error event within a stream
            raise refusal(name, 200, error.body or error.message, {}, self._secrets) from error
        except (ValueError, httpx2.InvalidURL) as error:
            raise ProviderError("invalid", f"{name} sent something that is no answer of this API") from error


async def connect(endpoint: Endpoint, sdk: Literal["openai", "anthropic"]) -> Connection:
    """Open an endpoint; the first use of an SDK imports it, beside the loop."""
    return Connection(endpoint, await asyncio.to_thread(importlib.import_module, sdk))


class _TooMuch(httpx2.ReadError):
    pass


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MOST_BYTES
        async for chunk in self._stream:
            left -= len(chunk)
            if left < 0:
                raise _TooMuch("too much")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def _http_client(endpoint: Endpoint, custom_headers: str) -> httpx2.AsyncClient:
    """A client that sends what the endpoint's owner said, and nothing that the SDK finds in the environment."""
    foreign = [line.partition(":")[0].strip() for line in os.environ.get(custom_headers, "").splitlines()]
    foreign += ["openai-organization", "openai-project"]
    if not endpoint.api_key:
        foreign.append("authorization")

    async def dress(request: httpx2.Request) -> None:
        for name in foreign:
            request.headers.pop(name, None)
        request.headers.update({"accept-encoding": "identity", "user-agent": "helexa-acp"} | endpoint.headers)

    async def bound(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise httpx2.DecodingError("it was asked not to compress", request=response.request)
        response.stream = _Bounded(cast(httpx2.AsyncByteStream, response.stream))

    hooks: dict[str, list[Any]] = {"request": [dress], "response": [bound]}
    return httpx2.AsyncClient(timeout=_TIMEOUT, follow_redirects=False, event_hooks=hooks)


def _json(content: bytes) -> Any:
    text = content.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
