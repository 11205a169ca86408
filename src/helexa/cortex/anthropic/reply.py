"""Responses to clients of Anthropic's API, translated from a node's chat completion."""

import orjson
from starlette.types import Send

from helexa.core.errors import ApiError
from helexa.cortex.anthropic.errors import error_headers, to_anthropic_error
from helexa.cortex.anthropic.messages_format import Translation
from helexa.cortex.anthropic.responses.response import malformed
from helexa.cortex.anthropic.responses.stream import MessageStream
from helexa.cortex.replies.reply import Reply
from helexa.http.connections.request_head import Headers

MAX_RESPONSE_BYTES = 64 << 20

_BODY_HEADERS = (b"content-length", b"content-type", b"content-encoding", b"etag", b"cache-control")
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class AnthropicReply(Reply):
    """Translates a node's chat completion to a response of the Messages API and sends the response to the client.

    Streams are translated chunk by chunk. A non-streaming response is buffered until it is complete, so that the
    gateway can still send an error response if the completion is malformed.

    Attributes:
        translation: the translated request, or None before the request is parsed. As long as it is None, only an error
            response can be sent.
    """

    def __init__(self, send: Send, request_id: str | None = None) -> None:
        super().__init__(send)
        self.translation: Translation | None = None
        self._request_id = request_id
        self._events: MessageStream | None = None
        self._status = 0
        self._node_headers: Headers = []
        self._buffer = bytearray()
        if request_id is not None:
            self.headers.append((b"request-id", request_id.encode("latin-1", "replace")))

    async def start(self, status: int, headers: Headers, *, streamed: bool) -> None:
        """Store the node's status and headers. If the node's response is a stream, also send them to the client now.

        Raises:
            ApiError: 502 `upstream_malformed_response`: the node sends a stream that the client did not request, or
                does not send the requested stream.
        """
        assert self.translation is not None
        self._status, self._node_headers = status, [header for header in headers if header[0] not in _BODY_HEADERS]
        if not 200 <= status < 300:
            return
        if streamed != self.translation.stream:
            raise malformed("events were expected" if self.translation.stream else "no events were expected")
        if streamed:
            self._events = self.translation.events(self._request_id)
            await super().start(status, [*_STREAM_HEADERS, *self._node_headers], streamed=False)

    async def write(self, chunk: bytes) -> None:
        """Translate and send the next bytes of a node's stream, or buffer the next bytes of a non-streaming response.

        Raises:
            ApiError: the node's response is malformed. If the response is a stream, the error event was already sent to
                the client.
        """
        if self._events is not None:
            await self._send_events(self._events, self._events.feed(chunk))
            return
        self._buffer += chunk
        if len(self._buffer) > MAX_RESPONSE_BYTES:
            raise malformed(f"it is larger than {MAX_RESPONSE_BYTES} bytes")

    async def finish(self, chunk: bytes = b"") -> None:
        """Translate and send the last bytes of the node's response, and end the response to the client.

        Raises:
            ApiError: the node returned an error, or its response is incomplete or malformed.
        """
        assert self.translation is not None
        if chunk:
            await self.write(chunk)
        if self._events is not None:
            await self._send_events(self._events, self._events.finish())
        else:
            body = self.translation.translate(self._status, bytes(self._buffer), self._retry_after())
            await self._send_complete(self._status, self._node_headers, body)
        await super().finish()

    async def abort(self, error: ApiError) -> None:
        """End the response to the client with an error.

        If a stream has begun, the error is sent as its last event. Otherwise it is sent as an HTTP error response.
        """
        if self._events is not None:
            await super().write(self._events.fail(error))
        else:
            body = orjson.dumps(to_anthropic_error(error, self._request_id))
            headers = [(name.lower().encode(), value.encode()) for name, value in error_headers(error).items()]
            await self._send_complete(error.status, headers, body)
        await super().finish()

    async def _send_complete(self, status: int, headers: Headers, body: bytes) -> None:
        body_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await super().start(status, [*body_headers, *headers], streamed=False)
        await super().write(body)

    async def _send_events(self, events: MessageStream, data: bytes) -> None:
        await super().write(data)
        if events.failure is not None:
            raise events.failure

    def _retry_after(self) -> int | None:
        value = dict(self._node_headers).get(b"retry-after", b"")
        return int(value) if value.isdigit() and len(value) < 9 else None
