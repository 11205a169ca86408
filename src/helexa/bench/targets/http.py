"""Short JSON requests to a target that are not part of the measured load. Their duration and size are limited."""

import asyncio
from typing import Any

import aiohttp
import orjson

from helexa.bench.targets.target import TargetError

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
        """Send a GET request and return the parsed JSON response, or None if the request fails."""
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
            raise TargetError(f"{self.endpoint}{path}: no answer within {timeout_secs:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TargetError(f"{self.endpoint}{path}: {error}"[:_MAX_REASON_CHARS]) from error
        if status // 100 != 2:
            reason = text[:_MAX_REASON_CHARS].decode("utf-8", "replace")
            raise TargetError(f"{self.endpoint}{path}: HTTP {status}: {reason}")
        try:
            return orjson.loads(text)
        except ValueError:
            raise TargetError(f"{self.endpoint}{path}: the answer is not JSON") from None


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            raise ValueError(f"the answer is over {_MAX_BYTES} bytes")
    return b"".join(parts)
