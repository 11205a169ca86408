"""Responses in another API format than the node's, translated as they arrive."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.types import Send

from helexa.core.errors import ApiError
from helexa.core.sse import Frames
from helexa.cortex.forwarding.client_reply_and_error_events import Reply
from helexa.cortex.upstream.error_responses import read_error, read_error_value
from helexa.cortex.upstream.response_body import malformed
from helexa.http.headers import Headers

_STATUSES = {"invalid_request_error": 400, "rate_limit_error": 429, "insufficient_quota": 429}


def reasoning(message: Mapping[str, Any]) -> Any:
    """Return the reasoning of a chat message or delta; empty or None if it has none.

    Backends use one of two names for the field.
    """
    return message.get("reasoning_content") or message.get("reasoning")


def first_choice(completion: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the first choice of a chat completion, or None if it has none."""
    choices = completion.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, dict) else None


def call_as_text(name: str, arguments: str) -> str:
    """Return a JSON text that shows a tool call whose arguments are invalid."""
    return orjson.dumps({"name": name, "arguments": arguments}).decode()


def read_completion(status: int, body: bytes, retry_after: int | None) -> dict[str, Any]:
    """Parse a node's non-streaming response, and return its JSON object.

    Raises:
        ApiError: the node returned an error (see `read_error`), or its response is malformed (502).
    """
    if not 200 <= status < 300:
        raise read_error(status, body, retry_after)
    try:
        completion = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise malformed("the response is not JSON") from None
    if not isinstance(completion, dict):
        raise malformed("the response is not a JSON object")
    return completion


def streamed_error(error: Any) -> ApiError:
    """Convert the value of `error` in an event of a node's stream to an `ApiError`."""
    kind = error.get("type") if isinstance(error, dict) else None
    status = _STATUSES.get(kind, 500) if isinstance(kind, str) else 500
    return read_error_value(status, {"error": error})


class StreamTranslator(ABC):
    """Converts a node's event stream to a stream in the client's API format.

    Subclasses append the translated bytes to `_out`.
    """

    def __init__(self) -> None:
        # The error that ended the stream; None if no error has ended it. The bytes that report this error to the client
        # were part of the bytes that `feed`, `finish` or `fail` returned.
        self.failure: ApiError | None = None
        self._frames = Frames()
        self._out: list[bytes] = []
        self._ended = False

    def feed(self, chunk: bytes) -> bytes:
        """Translate the next bytes. An error is stored in `failure` and ends the stream."""
        if self._ended:
            return b""
        try:
            for data in self._frames.feed(chunk):
                if data is None:
                    self._keep_alive()
                elif data == b"[DONE]":
                    self._finish()
                    break  # bytes after `[DONE]` are not part of the answer
                else:
                    self._read(_event(data))
        except ApiError as error:
            self._end_with(error)
        except ValueError as error:
            self._end_with(malformed(str(error)[:100]))
        return self._take_output()

    def finish(self) -> bytes:
        """Handle the end of the node's response, and return the last bytes of the stream.

        If the node sent no finish reason, its response is incomplete, and the stream ends with an error.
        """
        if not self._ended:
            try:
                self._finish()
            except ApiError as error:
                self._end_with(error)
        return self._take_output()

    def fail(self, error: ApiError) -> bytes:
        """End the stream with `error`, and return its last bytes; empty if it had ended."""
        if not self._ended:
            self._end_with(error)
        return self._take_output()

    @abstractmethod
    def _keep_alive(self) -> None:
        """Append the bytes that keep the stream alive."""

    @abstractmethod
    def _read(self, event: dict[str, Any]) -> None:
        """Append the translation of one event of the node's stream.

        Raises:
            ApiError: the chunk is malformed (502).
        """

    @abstractmethod
    def _end(self) -> None:
        """Append the end of a complete stream.

        Raises:
            ApiError: the node's response is incomplete (502).
        """

    @abstractmethod
    def _fail(self, error: ApiError) -> None:
        """Append the bytes that report `error`."""

    def _finish(self) -> None:
        self._end()
        self._ended = True

    def _end_with(self, error: ApiError) -> None:
        self._fail(error)
        self.failure, self._ended = error, True

    def _take_output(self) -> bytes:
        output = b"".join(self._out)
        self._out.clear()
        return output


def _event(data: bytes) -> dict[str, Any]:
    event = orjson.loads(data)
    if not isinstance(event, dict):
        raise malformed("an event of the stream is not a JSON object")
    if error := event.get("error"):
        raise streamed_error(error)
    return event


MAX_RESPONSE_BYTES = 64 << 20

_BODY_HEADERS = (b"content-length", b"content-type", b"content-encoding", b"etag", b"cache-control")


class TranslatedReply(Reply):
    """Translates a node's response to the client's API format, and sends it.

    Streams are translated chunk by chunk. A whole response is buffered, so that the gateway can still send an error
    response if it is malformed.
    """

    stream_type: bytes  # value of the `content-type` header of streams
    keep_alive_bytes: bytes = b""  # bytes that keep a started stream alive; empty if the format has none

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._translator: StreamTranslator | None = None
        self._status = 0
        self._node_headers: Headers = []
        self._buffer = bytearray()

    @abstractmethod
    def expects_stream(self) -> bool:
        """Return whether the client requests a stream."""

    @abstractmethod
    def new_translator(self) -> StreamTranslator:
        """Return the object that translates the node's stream."""

    @abstractmethod
    def translate(self, status: int, body: bytes, retry_after: int | None) -> bytes:
        """Translate a node's non-streaming response.

        Raises:
            ApiError: the node returned an error, or its response is malformed (502).
        """

    @abstractmethod
    def error_response(self, error: ApiError) -> tuple[bytes, dict[str, str]]:
        """Return the JSON body and the HTTP headers of an error response."""

    async def start(self, status: int, headers: Headers, *, streamed: bool) -> None:
        """Store the node's status and headers, and send them if the response is a stream.

        Raises:
            ApiError: 502 `upstream_malformed_response`: the node sends a stream that the client did not request, or
                does not send the requested stream.
        """
        self._status, self._node_headers = status, [header for header in headers if header[0] not in _BODY_HEADERS]
        if not 200 <= status < 300:
            return
        if streamed != self.expects_stream():
            raise malformed(
                "the response is an event stream, but the request did not ask for one"
                if streamed
                else "the response is not an event stream, although the request asked for one"
            )
        if streamed:
            self._translator = self.new_translator()
            stream_headers = [(b"content-type", self.stream_type), (b"cache-control", b"no-cache")]
            await super().start(status, [*stream_headers, *self._node_headers], streamed=False)

    async def write(self, chunk: bytes) -> None:
        """Translate and send the next bytes of a stream; buffer the bytes of a whole body.

        Raises:
            ApiError: the node's response is malformed. In a stream, the client has already received the error.
        """
        if self._translator is not None:
            await self._send_translated(self._translator, self._translator.feed(chunk))
            return
        self._buffer += chunk
        if len(self._buffer) > MAX_RESPONSE_BYTES:
            raise malformed(f"the response is larger than {MAX_RESPONSE_BYTES} bytes")

    async def keep_alive(self) -> None:
        """Send `keep_alive_bytes` in a started stream."""
        if self._translator is not None and self.keep_alive_bytes:
            await super().write(self.keep_alive_bytes)

    async def finish(self, chunk: bytes = b"") -> None:
        """Translate and send the last bytes, and end the response to the client.

        Raises:
            ApiError: the node returned an error, or its response is incomplete or malformed.
        """
        if chunk:
            await self.write(chunk)
        if self._translator is not None:
            await self._send_translated(self._translator, self._translator.finish())
        else:
            body = self.translate(self._status, bytes(self._buffer), self._retry_after())
            await self._send_complete(self._status, self._node_headers, body)
        await super().finish()

    async def abort(self, error: ApiError) -> None:
        """End the response with an error event in a stream, else with an error response."""
        if self._translator is not None:
            await super().write(self._translator.fail(error))
        else:
            body, error_headers = self.error_response(error)
            headers = [(name.lower().encode(), value.encode()) for name, value in error_headers.items()]
            await self._send_complete(error.status, headers, body)
        await super().finish()

    async def _send_complete(self, status: int, headers: Headers, body: bytes) -> None:
        body_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await super().start(status, [*body_headers, *headers], streamed=False)
        await super().write(body)

    async def _send_translated(self, translator: StreamTranslator, data: bytes) -> None:
        await super().write(data)
        if translator.failure is not None:
            raise translator.failure

    def _retry_after(self) -> int | None:
        value = dict(self._node_headers).get(b"retry-after", b"")
        return int(value) if value.isdigit() and len(value) < 9 else None
