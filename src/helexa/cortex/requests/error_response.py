"""Error responses. Clients of Anthropic's API get Anthropic's format, and all other clients get OpenAI's format."""

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


def error_response(error: ApiError) -> Response:
    """Return the HTTP response for `error` in OpenAI's format."""
    return JsonResponse(error.envelope(), error.status, error.headers())


async def handle_api_error(request: Request, error: Exception) -> Response:
    """Return the error response for an `ApiError` that a route raised."""
    assert isinstance(error, ApiError)
    return _error_response_for(request, error)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Return the error response for an error of Starlette's router: 404 for an unknown path, 405 for a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 404:
        return _error_response_for(request, ApiError(404, "unknown_path", f"unknown path {path}"))
    if error.status_code == 405:
        method_error = ApiError(405, "method_not_allowed", f"{path} does not accept {request.method}")
        response = _error_response_for(request, method_error)
        response.headers.update(error.headers or {})
        return response
    return _error_response_for(request, ApiError(error.status_code, None, error.detail))


async def handle_database_error(request: Request, error: Exception) -> Response:
    """Log the `DatabaseError` that a route raised, and return a 503 response."""
    log.warning("%s", error)
    return _error_response_for(
        request, service_unavailable("the ledger's database does not answer", _DATABASE_RETRY_SECS)
    )


async def handle_unexpected_error(request: Request, _error: Exception) -> Response:
    """Return a 500 response for an unexpected exception of a route. The server logs the traceback."""
    return _error_response_for(request, internal_error())


def _error_response_for(request: Request, error: ApiError) -> Response:
    """Return the response for `error` in the format of the client's API.

    A request uses Anthropic's API if its path begins with `/v1/messages`, or if it has the header `anthropic-version`.
    """
    if not (request.url.path.startswith(_ANTHROPIC_PATHS) or VERSION_HEADER in request.headers):
        return error_response(error)
    name = request_id(request.scope["headers"])
    return JsonResponse(to_anthropic_error(error, name), error.status, {"request-id": name, **error_headers(error)})
