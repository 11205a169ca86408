"""`GET /openapi.json`: the OpenAPI document of this API."""

from functools import cache

import orjson
from starlette.requests import Request
from starlette.responses import Response

from helexa.cortex.api.openapi import document


async def get_document(_request: Request) -> Response:
    """Respond with the OpenAPI document as JSON."""
    return Response(_encoded(), media_type="application/json")


@cache
def _encoded() -> bytes:
    return orjson.dumps(document())
