"""Report token counts to gateways, even if the gateway's client has not requested them or has disconnected."""

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
    """Return whether the request has the header `_INCLUDE_USAGE`, with which gateways request a last chunk with usage.

    Gateways send the header even if the client's `stream_options` request no usage. They then remove the chunk from the
    stream.
    """
    return request.headers.get(_INCLUDE_USAGE) in ("1", _PROMPT)


def counts_prompt(request: Request) -> bool:
    """Return whether a gateway requests a chunk (`helexa_prompt`) with the prompt's token counts before the answer.

    The gateway needs these counts for Anthropic's Messages API: the first event of a stream in this API contains them.
    """
    return request.headers.get(_INCLUDE_USAGE) == _PROMPT


async def get_usage(request: Request) -> Response:
    """Handle `GET /usage/{id}`: return the token counts of the request that had the header `x-helexa-usage-id: id`.

    If the request is still running, wait up to `WAIT_SECONDS` for its end.
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
