"""Calls to nodes that generate no answer: tokenization, and counts of tokens."""

import asyncio
from typing import Any

import orjson

from helexa.core.errors import ApiError
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import FleetView
from helexa.cortex.fleet.node_client import bearer_header
from helexa.cortex.forwarding.request import ClientRequest
from helexa.cortex.forwarding.request_body_limit_and_workers import BodyWorkers
from helexa.cortex.forwarding.token_bounds import CHAT, COMPLETIONS
from helexa.cortex.routing import WarmRoute, route
from helexa.cortex.upstream.client import Upstream
from helexa.cortex.upstream.connection_and_timeouts import UpstreamError
from helexa.cortex.upstream.usage_meter import Usage, usage_of
from helexa.http.headers import Headers

TOKENIZE_PATH = "/tokenize"
USAGE_TIMEOUT_SECS = 10.0
COUNT_TIMEOUT_SECS = 5.0

_USAGE_PAUSES = (0.0, 0.1, 0.4)
_MAX_RESPONSE_BYTES = 8 << 20


class NodeCalls:
    """Calls nodes to tokenize, or to get token counts. A failed call returns None."""

    def __init__(self, upstream: Upstream, fleet: Fleet, body_workers: BodyWorkers) -> None:
        self._upstream = upstream
        self._fleet = fleet
        self._body_workers = body_workers

    async def call(
        self, target: WarmRoute, path: str, body: bytes = b"", method: bytes = b"POST", identity: Headers | None = None
    ) -> tuple[int, bytes] | None:
        """Call an endpoint of a node, and return status and body of the response.

        The result is None if the node does not respond or its response is too long.

        Args:
            identity: headers with the account id and the key id of the client's request.
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
        """Fetch the token counts of a finished request from `GET /usage/{id}` of a node.

        The result is None if the node does not return token counts within `USAGE_TIMEOUT_SECS`.

        Args:
            usage_id: the id that the gateway sent with the request; empty for third-party backends, which have no
                counts.
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

    async def prompt_tokens(self, view: FleetView, model: str, request: ClientRequest) -> int | None:
        """Let a helexa node count the prompt tokens of `request`, and return the count.

        The result is None if no helexa node with the model responds within `COUNT_TIMEOUT_SECS`. It is also None for
        requests other than chat and text completions.
        """
        target = route(view, model)
        if request.path not in (CHAT, COMPLETIONS) or target is None or target.kind != "neuron":
            return None
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_SECS):
                body = await self._body_workers.run_if(request.large, request.body_for, model, target.kind)
                response = await self.call(target, TOKENIZE_PATH, body)
        except (TimeoutError, ApiError):
            return None
        return None if response is None else parse_count(*response)


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a node's response; {} if it is not a JSON object."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def parse_count(status: int, body: bytes) -> int | None:
    """Return the token count in a response to `POST /tokenize`; None if invalid."""
    if status != 200:
        return None
    count = json_object(body).get("count")
    return count if type(count) is int and count >= 0 else None
