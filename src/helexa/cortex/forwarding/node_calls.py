"""Calls to a node other than generation, such as tokenizing a prompt or reading the usage of a finished request."""

import asyncio
from typing import Any

import orjson

from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.requests.headers import bearer_header
from helexa.cortex.routing.router import WarmRoute
from helexa.cortex.upstream.client import Upstream
from helexa.cortex.upstream.errors import UpstreamError
from helexa.cortex.usage.meter import Usage, usage_of
from helexa.http.connections.request_head import Headers

USAGE_TIMEOUT_SECS = 10.0

_USAGE_PAUSES = (0.0, 0.1, 0.4)
_MAX_RESPONSE_BYTES = 8 << 20


class NodeCalls:
    """Client for node endpoints that generate no output. A failed call returns None and raises no error."""

    def __init__(self, upstream: Upstream, fleet: Fleet) -> None:
        self._upstream = upstream
        self._fleet = fleet

    async def call(
        self, target: WarmRoute, path: str, body: bytes = b"", method: bytes = b"POST", identity: Headers | None = None
    ) -> tuple[int, bytes] | None:
        """Call an endpoint of a node, and return the HTTP status and the body of the response.

        The result is None if the node does not respond or its response is too long.

        Args:
            target: the node, with the URL of its server.
            path: path of the endpoint.
            body: JSON body, or empty.
            method: HTTP method.
            identity: headers with the account id and key id of the request, or None.
        """
        headers = [
            (b"content-type", b"application/json"),
            *(identity or ()),
            *bearer_header(self._fleet.bearer(target.node)),
        ]
        try:
            response = await self._upstream.ask(method, target.url, path, headers, body, repeatable=True)
        except UpstreamError:
            return None
        try:
            content = bytearray()
            while chunk := await response.chunk():
                content += chunk
                if len(content) > _MAX_RESPONSE_BYTES:
                    return None
            return response.status, bytes(content)
        except UpstreamError:
            return None
        finally:
            response.close()

    async def usage(self, target: WarmRoute, usage_id: str, *, answered: bool) -> Usage | None:
        """Fetch the token counts of a finished request from the node's endpoint `GET /usage/{id}`.

        The result is None if `usage_id` is empty, or if the node does not return token counts within
        `USAGE_TIMEOUT_SECS`.

        Args:
            target: the node that processed the request.
            usage_id: the id that the gateway sent with the request. The node stores the token counts under this id. The
                id is empty for third-party backends.
            answered: True if the node had begun its response. If False, the node may not have read the request yet, so
                the call is repeated a few times.
        """
        if not usage_id:
            return None
        try:
            async with asyncio.timeout(USAGE_TIMEOUT_SECS):
                for pause in _USAGE_PAUSES[: 1 if answered else None]:
                    await asyncio.sleep(pause)
                    response = await self.call(target, f"/usage/{usage_id}", method=b"GET")
                    if response is not None and response[0] == 200:
                        return usage_of(json_object(response[1]))
        except TimeoutError:
            pass
        return None


def json_object(body: bytes) -> dict[str, Any]:
    """Parse `body` as JSON, and return the object. Return an empty dict if `body` is not a JSON object."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
