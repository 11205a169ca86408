"""The interface of servers to measure, and JSON requests to them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import orjson

from helexa.bench.identity import Build, Host, Model
from helexa.bench.store.row_types import Reading
from helexa.core.errors import HelexaError


class TargetError(HelexaError):
    """A target is unreachable, returns an error, or returns an invalid response."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The current host and build of a target (server to measure)."""

    host: Host
    build: Build


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is loaded on a target."""

    model: Model  # name and configuration
    capabilities: frozenset[str] = frozenset({"text"})  # for example `text`, `vision`, `image`, `embedding`
    context: int | None = None  # context length in tokens, or None if unknown
    tool_call: bool = True  # False if the server reports that the model does not support tool calls
    # Body of a request that loads the model with its current settings. Empty if the server cannot load models.
    load: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """The model's name, as used in requests."""
        return self.model.name


class TargetServer(Protocol):
    """A server to measure. All methods may raise `TargetError`."""

    @property
    def ignore_eos(self) -> bool:
        """True if the server supports the parameter `ignore_eos`.

        With this parameter, the server continues decoding after the end-of-sequence token.
        """
        ...

    async def identity(self) -> Identity:
        """Return the current host and build of the server."""
        ...

    async def models(self) -> list[ServedModel]:
        """Return the models that are loaded on the server."""
        ...

    async def readings(self, at_s: float) -> list[Reading]:
        """Return a reading of each accelerator, with `at_s` as its time.

        Empty if the server does not report readings.
        """
        ...


_CALL_SECS = 10.0
_MAX_BYTES = 64 << 20  # an image of 4096 by 4096 pixels with little compression
_MAX_REASON_CHARS = 300


class JsonCalls:
    """Sends JSON requests to a target with the target's API key."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: str, headers: dict[str, str]) -> None:
        self._session = session
        self.endpoint = endpoint
        self._headers = headers

    async def get(self, path: str) -> Any:
        """Send a GET request and return the parsed JSON response.

        Raises:
            TargetError: the target is unreachable, returns an error status, or does not return JSON.
        """
        return await self._call("GET", path, None, _CALL_SECS)

    async def get_or_none(self, path: str) -> Any:
        """Send a GET request and return the JSON response, or None if it fails."""
        try:
            return await self.get(path)
        except TargetError:
            return None

    async def post(self, path: str, body: object, timeout_secs: float) -> Any:
        """Send `body` as JSON in a POST request and return the parsed JSON response.

        Raises:
            TargetError: the target is unreachable, returns an error status, or does not return JSON.
        """
        return await self._call("POST", path, body, timeout_secs)

    async def _call(self, method: str, path: str, body: object, timeout_secs: float) -> Any:
        headers, data = self._headers, None
        if body is not None:
            headers, data = {**headers, "content-type": "application/json"}, orjson.dumps(body)
        try:
            async with (
                asyncio.timeout(timeout_secs),
                self._session.request(method, f"{self.endpoint}{path}", data=data, headers=headers) as response,
            ):
                text = await _bounded(response.content)
                status = response.status
        except TimeoutError:
            raise TargetError(f"{self.endpoint}{path}: no answer within {timeout_secs:g} s; see its log") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TargetError(f"{self.endpoint}{path}: {error}"[:_MAX_REASON_CHARS]) from error
        if status // 100 != 2:
            reason = text[:_MAX_REASON_CHARS].decode("utf-8", "replace")
            raise TargetError(f"{self.endpoint}{path}: HTTP {status}: {reason}")
        try:
            return orjson.loads(text)
        except ValueError:
            raise TargetError(f"{self.endpoint}{path}: the answer is not JSON; check the endpoint") from None


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            raise ValueError(f"the answer is over {_MAX_BYTES} bytes")
    return b"".join(parts)
