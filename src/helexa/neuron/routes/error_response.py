"""Convert exceptions to JSON error responses in OpenAI's format, and log one line for each of them.

The application registers `HANDLERS`, which handle the exceptions that route functions raise.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from helexa.core.errors import ApiError, internal_error, overloaded
from helexa.core.logs import tell
from helexa.http.connections.local_errors import OUT_OF_DESCRIPTORS
from helexa.neuron.requests.request_record import current

logger = logging.getLogger(__name__)


def error_response(error: ApiError) -> Response:
    """Return the HTTP response for `error`, with its status, its headers and a JSON body."""
    return Response(
        orjson.dumps(error.envelope()), error.status, headers=error.headers(), media_type="application/json"
    )


def log_error_response(path: str, error: ApiError) -> None:
    """Log one line about the error response `error` to a request for `path`, and add it to the request's record."""
    current().error_codes.append(error.code or "internal")
    facts = {"path": path, "status": error.status, "type": error.type, "code": error.code, "detail": str(error)}
    tell(logger, logging.WARNING, "refused", **facts | error.extras)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Log the `ApiError` that a route function raised, and return its error response."""
    assert isinstance(error, ApiError)
    log_error_response(request.url.path, error)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Return the error response for an unknown path or a method that the route does not support, and log the error."""
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    api_error = ApiError(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
    log_error_response(request.url.path, api_error)
    response = error_response(api_error)
    response.headers.update(error.headers or {})
    return response


def descriptor_shortage(error: BaseException) -> ApiError | None:
    """Return the error for the response if `error` says that no file descriptors are left; None for other errors."""
    if isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:
        return overloaded("the node has no file descriptors left; try again", 1)
    return None


async def on_os_error(request: Request, error: Exception) -> Response:
    """Return the error response if no file descriptors are left. Raise any other `OSError` again as unexpected."""
    api_error = descriptor_shortage(error)
    if api_error is None:
        raise error
    log_error_response(request.url.path, api_error)
    return error_response(api_error)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Log an exception that no other handler handles, and return a response with status 500 and without details.

    Starlette raises the exception again after the response.
    """
    current().error_codes.append("internal")
    tell(logger, logging.ERROR, "failed", path=request.url.path, error=type(error).__name__)
    return error_response(internal_error())


HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: on_api_error,
    HTTPException: on_http_exception,
    OSError: on_os_error,
    Exception: on_unexpected,
}
