"""Error responses: in OpenAI's format, or in Anthropic's format for clients of that API."""

import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError, internal_error, service_unavailable
from helexa.cortex.anthropic.errors import error_headers, to_anthropic_error
from helexa.cortex.anthropic.models import VERSION_HEADER
from helexa.http.connections.request_head import request_id
from helexa.http.json_response import JsonResponse

log = logging.getLogger(__name__)

_ANTHROPIC_PATHS = ("/v1/messages",)
_DATABASE_RETRY_SECS = 5


def refusal(error: ApiError) -> Response:
    """Return the response for an error."""
    return JsonResponse(error.envelope(), error.status, error.headers())


async def refuse_api_error(request: Request, error: Exception) -> Response:
    """Handle an `ApiError` exception."""
    assert isinstance(error, ApiError)
    return _refusal_for(request, error)


async def refuse_http_error(request: Request, error: Exception) -> Response:
    """Handle the router's errors: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        return _refusal_for(request, ApiError(404, "unknown_path", f"there is nothing at {path}"))
    if error.status_code == 405:
        method_error = ApiError(405, "method_not_allowed", f"{path} does not accept {request.method}")
        response = _refusal_for(request, method_error)
        response.headers.update(error.headers or {})
        return response
    return _refusal_for(request, ApiError(error.status_code, None, error.detail))


async def refuse_without_database(request: Request, error: Exception) -> Response:
    """Handle a `DatabaseError` exception."""
    log.warning("%s", error)
    return _refusal_for(request, service_unavailable("the ledger's database does not answer", _DATABASE_RETRY_SECS))


async def refuse_anything(request: Request, _error: Exception) -> Response:
    """Handle an unexpected exception; the server logs the traceback."""
    return _refusal_for(request, internal_error())


def _refusal_for(request: Request, error: ApiError) -> Response:
    """Return the error response in the format that the path, or the client's version header, calls for."""
    if not (request.url.path.startswith(_ANTHROPIC_PATHS) or VERSION_HEADER in request.headers):
        return refusal(error)
    name = request_id(request.scope["headers"])
    return JsonResponse(to_anthropic_error(error, name), error.status, {"request-id": name, **error_headers(error)})
