"""Read the bodies of JSON requests, with limits on size and time."""

from starlette.requests import ClientDisconnect, Request

from helexa.core.errors import ApiError
from helexa.http.connections.request_head import require_json

MAX_BODY_BYTES = 64 << 20


async def read_json(request: Request) -> bytes:
    """Return the request body, after checking the content type and the size. The JSON is not parsed.

    Raises:
        ApiError: status 415: the content type is not JSON, or the body is compressed. 413: the body is larger than
            `MAX_BODY_BYTES`. 408: the client stopped sending the body. 400: the client disconnected.
    """
    require_json(request.scope["headers"])
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
        return bytes(body)
    except TimeoutError:
        raise ApiError(408, "request_timeout", "the client stopped sending the request body") from None
    except ClientDisconnect:
        raise ApiError(400, "client_disconnected", "the client disconnected during the request") from None


def _too_large() -> ApiError:
    return ApiError(413, "request_too_large", f"the request body is over the limit of {MAX_BODY_BYTES >> 20} MiB")
