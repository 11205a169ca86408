"""The one way in which the gateway says no over HTTP: the OpenAI envelope."""

import logging

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError, internal_error, service_unavailable

log = logging.getLogger(__name__)

_DATABASE_RETRY_SECS = 5


def refusal(error: ApiError) -> Response:
    """The response that carries an error."""
    headers = {"content-type": "application/json", **error.headers()}
    return Response(orjson.dumps(error.envelope()), error.status, headers)


def refusal_event(error: ApiError) -> bytes:
    """The last two events of a stream that cannot go on."""
    return b"data: " + orjson.dumps(error.envelope()) + b"\n\ndata: [DONE]\n\n"


async def refuse_api_error(_request: Request, error: Exception) -> Response:
    """Exception handler for `ApiError`."""
    assert isinstance(error, ApiError)
    return refusal(error)


async def refuse_http_error(request: Request, error: Exception) -> Response:
    """Exception handler for what the router refuses: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        return refusal(ApiError(404, "unknown_path", f"there is nothing at {path}"))
    if error.status_code == 405:
        response = refusal(ApiError(405, "method_not_allowed", f"{path} does not accept {request.method}"))
        response.headers.update(error.headers or {})
        return response
    return refusal(ApiError(error.status_code, None, error.detail))


async def refuse_without_database(_request: Request, error: Exception) -> Response:
    """Exception handler for `DatabaseError`."""
    log.warning("%s", error)
    return refusal(service_unavailable("the ledger's database does not answer", _DATABASE_RETRY_SECS))


async def refuse_anything(_request: Request, _error: Exception) -> Response:
    """Exception handler for faults of our own; the server logs the traceback."""
    return refusal(internal_error())
