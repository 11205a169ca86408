"""Responses to clients, and filters for headers that go to nodes and back."""

import re
from functools import lru_cache

import orjson
from starlette.types import Message, Send

from helexa.core.errors import ApiError
from helexa.core.sse import DONE, KEEP_ALIVE, frame
from helexa.http.headers import Headers

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_CREDENTIALS = {b"authorization", b"x-api-key", b"cookie"}
# `accept-encoding` is dropped so that nodes answer without compression, which the meter cannot read.
_REPLACED = {b"host", b"content-type", b"content-length", b"expect", b"accept-encoding", b"x-request-id"}
# The gateway has already checked the browser's origin; nodes reject requests from foreign pages.
_BROWSER = {b"origin", b"referer", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"sec-fetch-user"}
_NOT_FORWARDED = _HOP_BY_HOP | _CREDENTIALS | _REPLACED | _BROWSER
_IDENTITY_PREFIX = b"x-helexa-"
# The gateway's `cors_origins` decides which pages may read a response, not its nodes.
_CORS = {
    b"access-control-allow-origin",
    b"access-control-allow-credentials",
    b"access-control-expose-headers",
}
_NOT_RETURNED = _HOP_BY_HOP | _CORS | {b"date", b"server", b"x-request-id", b"x-helexa-route", b"x-helexa-advice"}

# Header that makes nginx forward events at once; by default, nginx buffers responses.
UNBUFFERED = (b"x-accel-buffering", b"no")

MAX_BUFFERED_BYTES = 64 << 10


def bearer_header(key: str | None) -> Headers:
    """Return the `Authorization` header for a node's API key; empty without a key."""
    return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]


def forwarded_headers(headers: Headers) -> Headers:
    """Return the headers of a client's request that go to nodes (names in lower case)."""
    # Credentials, hop-by-hop headers, headers of browsers such as `origin`, and headers that the gateway sets itself
    # are not forwarded. Headers with the prefix `x-helexa-` are not forwarded either, because nodes trust them.
    connection_headers = _headers_in_connection(headers)
    excluded = _NOT_FORWARDED | connection_headers if connection_headers else _NOT_FORWARDED
    return [
        (name, value)
        for name, value in headers
        if name not in excluded
        and not name.startswith(_IDENTITY_PREFIX)
        and not (b"\r" in value or b"\n" in value or b"\0" in value)
    ]


def returned_headers(headers: Headers) -> Headers:
    """Return the headers of a node's response that go to the client.

    Hop-by-hop headers, CORS headers and headers that the gateway sets itself are not returned.
    """
    connection_headers = _headers_in_connection(headers)
    excluded = _NOT_RETURNED | connection_headers if connection_headers else _NOT_RETURNED
    return [(name, value) for name, value in headers if name not in excluded]


def _headers_in_connection(headers: Headers) -> set[bytes]:
    if b"connection" not in dict(headers):
        return set()
    values = [value for name, value in headers if name == b"connection"]
    return {token.strip().lower() for value in values for token in value.split(b",")}


_ADVICE = {
    b"litellm": "retry 429 and 503 after Retry-After; context_length_exceeded is final until messages are shorter",
    b"agent-zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"agent zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"zed": "limits are in /v1/models as max_model_len and max_output_tokens",
}


def advice(headers: Headers) -> bytes | None:
    """Return the header `X-Helexa-Advice` for a known client, else None."""
    for header, value in headers:
        if header == b"user-agent":
            return _advice_for(value)
    return None


@lru_cache(maxsize=64)
def _advice_for(user_agent: bytes) -> bytes | None:
    lower_case = user_agent.lower()
    return next((text.encode() for name, text in _ADVICE.items() if name in lower_case), None)


class Reply:
    """One response to a client.

    An event stream is forwarded in whole lines. If a chunk ends within a line, the partial line is buffered until the
    line is complete. The gateway can therefore send an error event after each chunk. This adds no visible delay,
    because clients cannot use a partial line.
    """

    def __init__(self, send: Send) -> None:
        self.headers: Headers = []  # headers that the gateway adds to the headers of the node's response
        self.started = False  # True once status and headers were sent to the client
        self.writes = 0  # number of times that bytes of the body were sent to the client
        self.finished = False  # True once the response has ended
        self._send = send
        self._streamed = False
        self._partial_line = b""
        self._last_bytes = b""

    async def start(self, status: int, headers: Headers, *, streamed: bool) -> None:
        """Send status and headers. `streamed` is True if the body is an event stream."""
        self.started = True
        self._streamed = streamed
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self.headers]})

    async def write(self, chunk: bytes) -> None:
        """Send the next bytes of the body. In a stream, buffer a partial last line."""
        if self._streamed and (self._partial_line or not chunk.endswith(b"\n")):
            chunk = self._whole_lines(chunk)
        if chunk:
            self.writes += 1
            self._last_bytes = (self._last_bytes + chunk)[-3:] if len(chunk) < 3 else chunk[-3:]
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def keep_alive(self) -> None:
        """Send a comment in a stream, so that clients and proxies see it alive."""
        if self._streamed:
            comment = KEEP_ALIVE if self._ends_with_event() else b":\n"  # within an event, no empty line may follow
            await self._send({"type": "http.response.body", "body": comment, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        """Send the last bytes to the client and end the response."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": self._partial_line + chunk, "more_body": False})

    async def abort(self, error: ApiError) -> None:
        """End the response with an error.

        Without a sent status, the error is an HTTP error response; in an event stream, an error event. Any other
        started response is left incomplete, so the server closes the connection.
        """
        if not self.started:
            body = self.error_body(error)
            headers = [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            await self.start(error.status, headers, streamed=False)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        elif self._streamed:
            end_of_event = b"" if self._ends_with_event() else b"\n\n"
            body = end_of_event + self.failure(error)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def error_body(self, error: ApiError) -> bytes:
        """Return the body of an HTTP error response, for `abort`."""
        return orjson.dumps(error.envelope())

    def failure(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails with `error`, for `abort`."""
        return frame(orjson.dumps(error.envelope())) + DONE

    def _ends_with_event(self) -> bool:
        return not self._last_bytes or self._last_bytes.endswith((b"\n\n", b"\n\r\n"))

    def _whole_lines(self, chunk: bytes) -> bytes:
        buffered = self._partial_line + chunk
        line_end = buffered.rfind(b"\n") + 1 if len(buffered) <= MAX_BUFFERED_BYTES else len(buffered)
        self._partial_line = buffered[line_end:]
        return buffered[:line_end]


_EVENT = re.compile(rb"^data:", re.MULTILINE)


class ResponseReply(Reply):
    """One response to a client of the Responses API."""

    # The events of a stream are counted, because an error event must contain the next sequence number.
    def __init__(self, send: Send) -> None:
        super().__init__(self._count_and_send)
        self._send_on = send
        self._events = 0

    async def _count_and_send(self, message: Message) -> None:
        self._events += len(_EVENT.findall(message.get("body", b"")))
        await self._send_on(message)

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails with `error`."""
        event = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        return frame(orjson.dumps(event | {"sequence_number": self._events}), "error")
