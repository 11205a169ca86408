"""Counts the prompt tokens of a request with the tokenizer of a node."""

import asyncio

from helexa.core.errors import ApiError
from helexa.cortex.anthropic.count import TOKENIZE_PATH, parse_count
from helexa.cortex.fleet.fleet_view import FleetView
from helexa.cortex.forwarding.node_calls import NodeCalls
from helexa.cortex.requests.body_workers import BodyWorkers
from helexa.cortex.requests.request import ClientRequest
from helexa.cortex.routing.router import route
from helexa.cortex.usage.token_limit import CHAT, COMPLETIONS

TIMEOUT_SECS = 5.0
_PATHS = {CHAT: TOKENIZE_PATH, COMPLETIONS: TOKENIZE_PATH}


class PromptCounter:
    """Counts prompt tokens on nodes that have the model loaded."""

    def __init__(self, calls: NodeCalls, body_workers: BodyWorkers) -> None:
        self._calls = calls
        self._body_workers = body_workers

    async def count(self, view: FleetView, model: str, request: ClientRequest) -> int | None:
        """Let a helexa node count the prompt tokens of `request`, and return the count.

        The result is None if no helexa node with the model responds within `TIMEOUT_SECS`. It is also None for requests
        other than chat and text completions.
        """
        path, target = _PATHS.get(request.path), route(view, model)
        if path is None or target is None or target.kind != "neuron":
            return None
        try:
            async with asyncio.timeout(TIMEOUT_SECS):
                body = await self._body_workers.run_if(request.large, request.body_for, model, target.kind)
                response = await self._calls.call(target, path, body)
        except (TimeoutError, ApiError):
            return None
        return None if response is None else parse_count(*response)
