"""Converts a backend's answer to a generation request to OpenAI's format."""

import asyncio
import re
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, Protocol

from helexa.core.errors import ApiError
from helexa.core.sse import DONE, EventParser
from helexa.cortex.backends.completion import (
    as_stream,
    convert_completion,
    converted_completion,
    joined,
    read_completion,
)
from helexa.cortex.backends.completion_choice import UNCHANGED, Changes, Choice
from helexa.cortex.backends.errors import error_in
from helexa.cortex.backends.refused_messages_and_calls import with_original_names
from helexa.cortex.backends.stream import BackendStream
from helexa.cortex.upstream.connection_and_timeouts import UpstreamError
from helexa.cortex.upstream.response_body import BYTE_ORDER_MARK, as_json, malformed, read_json
from helexa.http.headers import Headers

MAX_WHOLE_BYTES = 64 << 20

STREAM_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")
JSON_TYPE = (b"content-type", b"application/json")
REPLACED_HEADERS = (b"content-type", b"content-length")
_DRAIN_SECS = 1.0


class NodeResponse(Protocol):
    """Interface of an answer of a node or backend, read chunk by chunk."""

    status: int
    headers: Headers

    @property
    def complete(self) -> bool:
        """Whether the whole body has been read."""
        ...

    def chunk(self) -> Coroutine[Any, Any, bytes]:
        """Return the next bytes, empty at the end. May raise `ApiError`, `UpstreamError`."""
        ...

    def close(self) -> None:
        """Release the connection. Call this once."""
        ...


class BackendAnswer:
    """A successful response of a backend, converted to OpenAI's format.

    In chat completions, a whole answer to a streaming request becomes a stream, and a stream becomes a whole answer if
    the client requests no stream. In text completions, both are errors (502).
    """

    def __init__(
        self,
        response: NodeResponse,
        first_chunk: bytes,
        *,
        model: str,
        chat: bool,
        streamed: bool,
        conversation: bytes,
        changes: Changes = UNCHANGED,
    ) -> None:
        self.status = 200
        # the headers of the response, with the content type of the converted body
        self.headers = [header for header in response.headers if header[0] not in REPLACED_HEADERS]
        self.headers.append(STREAM_TYPE if streamed else JSON_TYPE)
        self._response = response  # the backend's response
        self._first_chunk = first_chunk  # the first bytes of the body
        self._model = model  # name of the model in the request to the backend
        self._chat = chat  # True for a chat completion, False for a text completion
        self._streamed = streamed  # True if the client requests a stream
        self._conversation = conversation  # body of the request. Ids of tool calls that it contains are not used again.
        self._legacy = b'"functions"' in conversation  # True if the client uses the deprecated field `functions`
        self._changes = changes  # what the gateway changed in the tool calls of the request
        self._stream: BackendStream | None = None
        self._begun = self._ended = False

    @property
    def complete(self) -> bool:
        """Whether the whole converted body has been read."""
        return self._ended

    async def chunk(self) -> bytes:
        """Return the next bytes of the converted body, or empty bytes at its end.

        Raises:
            ApiError: the answer is an error, malformed or incomplete.
            UpstreamError, or a subclass: the connection to the backend failed.
        """
        if not self._begun:
            self._begun = True
            return await self._begin()
        if self._stream is None:
            return b""
        if self._ended:
            await self._drain()
            return b""
        return await self._next_events(self._stream)

    def close(self) -> None:
        """Release the connection to the backend."""
        self._response.close()

    async def _begin(self) -> bytes:
        first = self._first_chunk
        while first and not first.lstrip(BYTE_ORDER_MARK + b" \r\n\t"):
            if not (more := await self._response.chunk()):
                break
            first = more  # white space at the beginning of an answer has no meaning
        if first.lstrip().startswith(b"<"):
            raise malformed("the response is a web page")
        # The first bytes decide whether the body is a stream, not its content type.
        if _is_json(first):
            return await self._whole(first)
        continuous_usage = b'"continuous_usage_stats"' in self._conversation
        stream = BackendStream(self._new_choice, model=self._model, chat=self._chat, continuous_usage=continuous_usage)
        if self._streamed:
            self._stream = stream
            return self._events(stream, first) or await self._next_events(stream)
        return await self._joined(stream, first)

    async def _whole(self, first: bytes) -> bytes:
        body = await self._rest(first)
        self._ended = True
        if not self._streamed:
            return convert_completion(body, self._new_choice, chat=self._chat)
        completion, _ = read_completion(body)
        if not self._chat:
            raise malformed("the response is not an event stream, although the request asked for one")
        return as_stream(converted_completion(completion, self._new_choice, chat=True))

    async def _joined(self, stream: BackendStream, first: bytes) -> bytes:
        """Return the stream, which the client did not request, as one whole answer."""
        body = await self._rest(first)
        events = stream.feed(body) + stream.finish()
        if stream.failure is not None:
            raise stream.failure
        self._ended = True
        if not self._chat:
            raise malformed("the response is an event stream, but the request did not ask for one")
        return as_json(joined(_chunks(events)))

    async def _rest(self, first: bytes) -> bytes:
        body = bytearray(first)
        while chunk := await self._response.chunk():
            body += chunk
            if len(body) > MAX_WHOLE_BYTES:
                raise malformed(f"the response is larger than {MAX_WHOLE_BYTES} bytes")
        return bytes(body)

    async def _next_events(self, stream: BackendStream) -> bytes:
        """Return the next events of a stream that has not ended; raise its failure."""
        events = b""
        while not events:
            if stream.failure is not None:
                raise stream.failure
            data = await self._response.chunk()
            events = self._events(stream, data)
        return events

    def _events(self, stream: BackendStream, data: bytes) -> bytes:
        """Convert the next bytes of the stream, and set `_ended`.

        Empty `data` means the end of the stream.
        """
        events = stream.feed(data) if data else stream.finish()
        self._ended = stream.ended and stream.failure is None
        return events

    async def _drain(self) -> None:
        """Read the rest of a body after a complete answer, to reuse the connection."""
        try:
            async with asyncio.timeout(_DRAIN_SECS):
                while await self._response.chunk():
                    pass
        except (TimeoutError, UpstreamError):
            pass

    def _new_choice(self) -> Choice:
        return Choice(self._is_taken, legacy=self._legacy, changes=self._changes)

    def _is_taken(self, id: str) -> bool:
        return as_json(id) in self._conversation


def _is_json(body: bytes) -> bool:
    return body.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b"[", b"")


def _chunks(events: bytes) -> Iterator[dict[str, Any]]:
    for event in EventParser().feed(events.removesuffix(DONE)):
        yield read_json(event.data.encode())[0]


# Matches the beginning of a stream's last event. Text in the answer cannot match, because JSON escapes quotes and line
# breaks.
_LAST_EVENT = re.compile(
    rb"(?:^|\n)event: ?(?:response\.(?:completed|incomplete|failed)|error)\r?\n"
    rb'|"type"\s*:\s*"(?:response\.(?:completed|incomplete|failed)|error)"'
)

_MAX_MATCH_BYTES = 64  # number of bytes that are searched again with the next chunk: a match may span two chunks

# Matches the beginning of an error in LiteLLM's streams. The error event has no type, so clients of the Responses API
# cannot read it.
_ERROR_EVENT = re.compile(rb'(?:\A|\n)data: ?(?=\{\s*"error"\s*:)')
_MAX_ERROR_BYTES = 64 << 10


class NativeResponses:
    """A backend's own answer to a request of the Responses API, as a `NodeResponse`.

    The body stays as it is, except that the original names of functions replace the short names. The body must not be
    empty or a web page, and a stream must have its last event.

    Args:
        response: the backend's response.
        first_chunk: the first bytes of its body.
        streamed: True if the client requests a stream.
        names: original names of the functions whose names the gateway shortened for the backend, by the short name.
    """

    def __init__(self, response: NodeResponse, first_chunk: bytes, *, streamed: bool, names: Mapping[str, str]) -> None:
        self.status = 200
        # the headers of the response, with the content type that the client expects
        self.headers = [header for header in response.headers if header[0] not in REPLACED_HEADERS]
        self.headers.append(STREAM_TYPE if streamed else JSON_TYPE)
        self._response = response
        self._first_chunk: bytes | None = first_chunk.removeprefix(BYTE_ORDER_MARK)
        self._streamed = streamed
        self._names = names
        # the beginning of an incomplete line, held back because it may end within a shortened name (see `names`)
        self._line = bytearray()
        self._tail = b""
        self._error: bytes | None = None  # beginning of an error without a type; all bytes before it were returned
        self._has_last_event = False

    @property
    def complete(self) -> bool:
        """Whether the whole body has been read."""
        has_end = self._has_last_event or not self._streamed
        return self._first_chunk is None and has_end and self._response.complete and not self._line

    async def chunk(self) -> bytes:
        """Return the next bytes of the body, or empty bytes at its end.

        Raises:
            ApiError: 502: the body is empty or a web page, or a stream has ended without its last event. An error event
                without a type, which clients could not read, is raised with its own status.
            UpstreamError, or a subclass: the connection to the backend failed.
        """
        if not self._names:
            return await self._next_chunk()
        while chunk := await self._next_chunk():
            lines, separator, rest = chunk.rpartition(b"\n")
            if separator:
                lines, self._line = bytes(self._line) + lines + separator, bytearray(rest)
                return with_original_names(lines, self._names)
            self._line += rest
            if len(self._line) > MAX_WHOLE_BYTES:
                raise malformed(f"the response is larger than {MAX_WHOLE_BYTES} bytes")
        line, self._line = bytes(self._line), bytearray()
        return with_original_names(line, self._names)

    async def _next_chunk(self) -> bytes:
        if self._error is not None:
            raise await self._read_error(self._error)
        chunk, self._first_chunk = self._first_chunk, None
        if chunk is None:
            chunk = await self._response.chunk()
        elif not chunk or chunk.lstrip().startswith(b"<"):
            raise malformed("the response is empty" if not chunk else "the response is a web page")
        if self._streamed and not self._has_last_event:
            error = _ERROR_EVENT.search(chunk)
            if error is not None and (error[0].startswith(b"\n") or self._tail[-1:] in (b"", b"\n")):
                self._error, chunk = chunk[error.end() :], chunk[: error.start() + error[0].startswith(b"\n")]
                return chunk or await self._next_chunk()
            self._tail += chunk
            self._has_last_event = _LAST_EVENT.search(self._tail) is not None
            self._tail = self._tail[-_MAX_MATCH_BYTES:]
            if not chunk and not self._has_last_event:
                raise malformed("the stream ended without its last event")
        return chunk

    async def _read_error(self, data: bytes) -> ApiError:
        """Read the rest of an error in the stream, and return the error."""
        while b"\n" not in data and len(data) <= _MAX_ERROR_BYTES and (chunk := await self._response.chunk()):
            data += chunk
        try:
            value, _ = read_json(data.partition(b"\n")[0].strip())
        except ValueError:
            value = None
        error = error_in(value) if isinstance(value, dict) else None
        return error or malformed("an error event of the stream is not JSON")

    def close(self) -> None:
        """Release the connection to the backend."""
        self._response.close()
