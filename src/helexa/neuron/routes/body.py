"""Read the bodies of JSON requests, with limits on size and time."""

from starlette.requests import ClientDisconnect, Request

from helexa.core.errors import ApiError, unsupported_media_type
from helexa.http.connections.request_head import reject_encoded

MAX_BODY_BYTES = 64 << 20


async def read_json(request: Request) -> bytes:
    """Return the request body, after checking the content type and the size. The JSON is not parsed.

    The content type must be JSON, to block requests from web pages of other sites. Before a browser sends JSON for such
    a page, it asks the server for permission (CORS preflight). For some other content types, it does not ask.

    Raises:
        ApiError: status 415: the content type is not JSON, or the body is compressed. 413: the body is larger than
            `MAX_BODY_BYTES`. 408: the client stopped sending the body. 400: the client disconnected.
    """
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise unsupported_media_type(content_type[:200])
    reject_encoded(request.scope["headers"])
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
