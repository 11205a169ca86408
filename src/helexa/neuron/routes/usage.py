"""Report token counts to gateways, also if their client did not request them or disconnected."""

import asyncio
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa.core.errors import ApiError
from helexa.http.json_response import JsonResponse
from helexa.neuron.requests.usage_records import UsageRecords

WAIT_SECONDS = 8.0

_INCLUDE_USAGE, _PROMPT = "x-helexa-include-usage", "prompt"


def reports_usage(request: Request) -> bool:
    """Return whether the gateway wants a usage chunk at the end of a stream, regardless of `stream_options`.

    The gateway drops this header from its clients' requests, adds its own, and removes the chunk if the client did not
    request it.
    """
    return request.headers.get(_INCLUDE_USAGE) in ("1", _PROMPT)


def counts_prompt(request: Request) -> bool:
    """Return whether the gateway wants a stream's prompt counts before the answer, in a chunk with `helexa_prompt`.

    The gateway requests these counts for the Messages API, whose first event contains them.
    """
    return request.headers.get(_INCLUDE_USAGE) == _PROMPT


async def get_usage(request: Request) -> Response:
    """`GET /usage/{id}`: the token counts of a request that ended recently, or that ends within `WAIT_SECONDS`.

    The id is the request's `x-helexa-usage-id`.
    """
    records: UsageRecords = request.app.state.usage
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            record = await records.find(request.path_params["usage_id"])
    except TimeoutError:
        record = None
    if record is None:
        raise ApiError(404, "usage_not_found", "no request with this usage id ended recently")
    return JsonResponse(asdict(record))


routes = [Route("/usage/{usage_id}", get_usage, methods=["GET"])]
