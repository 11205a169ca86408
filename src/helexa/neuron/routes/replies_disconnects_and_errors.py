"""Read JSON requests; send the output of a run; convert exceptions to responses."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from hashlib import blake2b
from http import HTTPStatus

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from helexa.core.errors import ApiError, ModelFileError, internal_error, overloaded
from helexa.core.logs import tell
from helexa.core.sse import KEEP_ALIVE
from helexa.http.headers import require_json
from helexa.http.process import OUT_OF_DESCRIPTORS
from helexa.neuron.output_events import Failed, InferenceEvent
from helexa.neuron.requests.request_and_run_records import current
from helexa.neuron.routes.answer_formats import Projector

MAX_BODY_BYTES = 64 << 20

FIRST_EVENT_SECONDS = 3.0
"""Seconds that a stream waits for its first event before it sends headers.

A run that fails earlier gets a plain error response. A later error is sent as an event of the stream.
"""

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 1.0  # seconds without an event after which a stream sends a keep-alive comment

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_ACCOUNT = "x-helexa-account-id"
_KEY = "x-helexa-key-id"
_INCLUDE_USAGE, _PROMPT = "x-helexa-include-usage", "prompt"


async def read_json(request: Request) -> bytes:
    """Return a request's unparsed body after checks of content type and size.

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
        raise ApiError(
            408, "request_timeout", "the client stopped sending the request body; send the request again"
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "client_disconnected", "the client disconnected during the request") from None


def _too_large() -> ApiError:
    return ApiError(
        413, "request_too_large", f"the request body is over the limit of {MAX_BODY_BYTES >> 20} MiB; send less"
    )


def principal_of(request: Request) -> str:
    """Return the name of a request's principal: a hash of account and key.

    The result is empty if the request lacks these headers. Each principal gets a fair share of the engine, and by
    default its own prefix cache.
    """
    # The node trusts these headers, because a gateway removes them from its clients' requests. A client that connects
    # to the node directly can name any principal. It could use that principal's share, and guess that principal's
    # prompts from response times. Therefore, only gateways should be able to reach a node.
    account, key = request.headers.get(_ACCOUNT), request.headers.get(_KEY)
    if not account or not key:
        return ""
    return blake2b(f"{account}\0{key}".encode(), digest_size=16).hexdigest()


def reports_usage(request: Request) -> bool:
    """Return whether the stream must end with a chunk of token counts."""
    # Gateways send the header with each request. If the client requests no usage, the gateway removes the chunk.
    return request.headers.get(_INCLUDE_USAGE) in ("1", _PROMPT)


def counts_prompt(request: Request) -> bool:
    """Return whether a gateway requests a chunk with the prompt's token counts."""
    # A gateway needs the counts early for Anthropic's Messages API, where a stream's first event contains them.
    return request.headers.get(_INCLUDE_USAGE) == _PROMPT


class RunResponse:
    """An ASGI response with a run's output, as a stream or as one body.

    The headers are sent with the first event of the run, so that the response to a rejected run can have an error
    status. If a stream has no event after `FIRST_EVENT_SECONDS`, the headers are sent at that time, and a later
    rejection becomes an event of the stream. If the client disconnects, the run is canceled.
    """

    def __init__(self, events: AsyncGenerator[InferenceEvent, None], projector: Projector, *, stream: bool) -> None:
        self._events = events
        self._projector = projector
        # A flag. Storing `self._send_stream` or `self._send_body` would create a reference cycle for each request.
        self._streamed = stream
        self._arrived = time.monotonic()
        self._begun = False
        self._quiet_since: float | None = None  # time of the last bytes; None if no keep-alive may be sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response.

        Raises:
            ApiError: the run was rejected, or a run without streaming failed. In both cases nothing has been sent to
                the client.
        """
        send_reply = self._send_stream if self._streamed else self._send_body
        sender = asyncio.create_task(send_reply(scope["path"], send))
        disconnect = asyncio.create_task(disconnected(receive))
        try:
            while not sender.done() and not disconnect.done():
                await asyncio.wait((sender, disconnect), timeout=self._until_due(), return_when=asyncio.FIRST_COMPLETED)
                # Proxies close a connection without data after some time. A comment in the stream prevents this.
                if not sender.done() and not disconnect.done() and self._until_due() <= 0:
                    await self._begin(send)
                    self._quiet_since = time.monotonic()
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        finally:
            sender.cancel()
            disconnect.cancel()
            await asyncio.wait((sender, disconnect))
        try:
            if not sender.cancelled():
                sender.result()
        finally:
            del sender  # breaks a reference cycle: the task holds an error, whose traceback holds this frame

    def _until_due(self) -> float:
        """Return the seconds until a stream must send a keep-alive comment."""
        if self._quiet_since is not None:
            return self._quiet_since + KEEP_ALIVE_SECONDS - time.monotonic()
        if self._streamed and not self._begun:
            return self._arrived + FIRST_EVENT_SECONDS - time.monotonic()
        return KEEP_ALIVE_SECONDS

    async def _send_body(self, path: str, send: Send) -> None:
        async with aclosing(self._events):
            async for event in self._events:
                if isinstance(event, Failed):
                    raise event.error  # nothing has been sent, so the response can have an error status
                self._projector.take(event)
        body = self._projector.body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, path: str, send: Send) -> None:
        async with aclosing(self._events):
            try:
                async for event in self._events:
                    await self._begin(send)
                    if isinstance(event, Failed):
                        log_error_response(path, event.error)
                    await self._write(event, send)
            except Exception as error:
                if not self._begun:
                    raise
                if isinstance(error, ApiError):
                    log_error_response(path, error)
                    await self._write(Failed(error), send)
                else:
                    logger.exception("stream ended by an internal error path=%s error=%s", path, type(error).__name__)
                    await self._write(Failed(internal_error()), send)
        self._quiet_since = None
        await send({"type": "http.response.body", "body": b""})

    async def _begin(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})

    async def _write(self, event: InferenceEvent, send: Send) -> None:
        frames = self._projector.frames(event)
        if frames:
            self._quiet_since = None  # no keep-alive comment may be sent in the middle of these frames
            await send({"type": "http.response.body", "body": frames, "more_body": True})
        self._quiet_since = time.monotonic()


async def disconnected(receive: Receive) -> None:
    """Wait until the client of a request (ASGI `receive`) disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def error_response(error: ApiError) -> Response:
    """Return the HTTP response for `error`, with its status, headers and JSON body."""
    return Response(
        orjson.dumps(error.envelope()), error.status, headers=error.headers(), media_type="application/json"
    )


def log_error_response(path: str, error: ApiError) -> None:
    """Log an error response in one line, and add its code to the request record."""
    current().error_codes.append(error.code or "internal")
    facts = {"path": path, "status": error.status, "type": error.type, "code": error.code, "error": str(error)}
    tell(logger, logging.WARNING, "refused", **facts | error.extras)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Log the `ApiError` that a route function raised, and return its error response."""
    assert isinstance(error, ApiError)
    log_error_response(request.url.path, error)
    return error_response(error)


async def on_model_file_error(request: Request, error: Exception) -> Response:
    """Return the error response to a request whose text the tokenizer rejects."""
    api_error = ApiError(422, "tokenization_failed", str(error))
    log_error_response(request.url.path, api_error)
    return error_response(api_error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Return the error response to a request with an unknown path or method."""
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    api_error = ApiError(error.status_code, code, f"{request.method} {request.url.path}: {error.detail}")
    log_error_response(request.url.path, api_error)
    response = error_response(api_error)
    response.headers.update(error.headers or {})
    return response


def descriptor_shortage(error: BaseException) -> ApiError | None:
    """Return the error response if `error` is a lack of file descriptors, else None."""
    if isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:
        return overloaded(
            "the node has no file descriptors left; try again, or raise its limit of open files (ulimit -n)", 1
        )
    return None


async def on_os_error(request: Request, error: Exception) -> Response:
    """Return the response for a lack of file descriptors, or raise `error`."""
    api_error = descriptor_shortage(error)
    if api_error is None:
        raise error
    log_error_response(request.url.path, api_error)
    return error_response(api_error)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Log an unexpected exception, and reply with status 500 without details."""
    current().error_codes.append("internal")
    tell(logger, logging.ERROR, "failed", path=request.url.path, error=type(error).__name__)
    return error_response(internal_error())


HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: on_api_error,
    ModelFileError: on_model_file_error,
    HTTPException: on_http_exception,
    OSError: on_os_error,
    Exception: on_unexpected,
}
