"""Responses of the Messages API, translated from a node's chat completion."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson
from starlette.types import Send

from helexa.core.errors import ApiError
from helexa.core.sse import frame
from helexa.cortex.anthropic.message_and_errors import (
    anthropic_usage,
    error_event,
    error_headers,
    message_usage,
    prompt_usage,
    read_object,
    stop_reason,
    to_anthropic_error,
    to_json,
    to_message,
    with_estimates,
)
from helexa.cortex.anthropic.request_settings_and_token_count import estimate_tokens, stop_sequences, to_chat
from helexa.cortex.anthropic.stream_content_blocks import Blocks
from helexa.cortex.forwarding.translated_reply import (
    StreamTranslator,
    TranslatedReply,
    first_choice,
    read_completion,
    reasoning,
)
from helexa.cortex.upstream.response_body import as_json, malformed

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageStream(StreamTranslator):
    """Converts a chat completion's stream to the events of the Messages API.

    The first event, `message_start`, contains the prompt's token counts. It is sent as soon as the node has sent one of
    these:

    * the prompt's token counts, which helexa's own nodes send before the prefill
    * a chunk with `usage`
    * a chunk with output

    Each keep-alive comment of the node becomes a `ping` event.
    """

    def __init__(
        self,
        model: str,
        message_id: str,
        *,
        input_tokens: int = 0,
        stop_sequences: Sequence[str] = (),
        request_id: str | None = None,
    ) -> None:
        super().__init__()
        self._model = model  # model name in the client's request
        self._message_id = message_id
        # Estimated number of prompt tokens. `message_start` contains it if the node sends no token counts before the
        # output.
        self._input_tokens = input_tokens
        self._prompt: dict[str, Any] = {}  # token counts of the prompt, if the node has sent `helexa_prompt`
        self._stop_sequences = stop_sequences  # the client's stop sequences
        self._request_id = request_id  # id of the request, used in an error event
        self._blocks = Blocks(self._out.append)
        self._usage: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self._matched: Any = None  # field `stop_reason` of the choice, in which some nodes report the stop sequence
        self._has_begun = False

    def _keep_alive(self) -> None:
        self._out.append(PING)

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        usage = message_usage(with_estimates(self._usage or self._prompt, self._input_tokens, 0))
        usage["output_tokens"] = 0
        message = {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        self._out.append(frame(orjson.dumps({"type": "message_start", "message": message}), "message_start"))
        self._out.append(PING)

    def _read(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
            self._begin()
        if not self._has_begun and (prompt := prompt_usage(event.get("helexa_prompt"))):
            self._prompt = prompt
            self._begin()
        choice = first_choice(event)
        if choice is None:
            return
        delta = choice.get("delta")
        if isinstance(delta, dict):
            self._add_delta(delta)
        finish_reason = choice.get("finish_reason")
        if isinstance(finish_reason, str):
            self._finish_reason, self._matched = finish_reason, choice.get("stop_reason")

    def _add_delta(self, delta: dict[str, Any]) -> None:
        reasoning_text = reasoning(delta)
        if isinstance(reasoning_text, str) and reasoning_text:
            self._begin()
            self._blocks.add_text("thinking", reasoning_text)
        for content_text in (delta.get("content"), delta.get("refusal")):
            if isinstance(content_text, str) and content_text:
                self._begin()
                self._blocks.add_text("text", content_text)
        calls = delta.get("tool_calls")
        if isinstance(calls, list):
            self._begin()
            for tool_call in calls:
                self._blocks.add_call(tool_call)

    def _end(self) -> None:
        if self._finish_reason is None:
            raise malformed("the answer ended without a finish reason")
        self._begin()
        self._blocks.close(cut_off=self._finish_reason == "length")
        reason, sequence = stop_reason(
            self._finish_reason, self._matched, called=self._blocks.called, stop_sequences=self._stop_sequences
        )
        # If the node reports no counts, the number of deltas is the best estimate of the output tokens.
        usage = with_estimates(self._usage or self._prompt, self._input_tokens, self._blocks.delta_count)
        message_delta = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": anthropic_usage(usage),
        }
        self._out.append(frame(orjson.dumps(message_delta), "message_delta"))
        self._out.append(frame(b'{"type":"message_stop"}', "message_stop"))

    def _fail(self, error: ApiError) -> None:
        self._begin()
        self._out.append(error_event(error, self._request_id))


@dataclass(frozen=True)
class Translation:
    """A Messages API request that was translated to a chat request."""

    body: bytes  # the chat request as JSON. It contains the client's model name.
    model: str  # model name in the client's request, possibly an alias
    stream: bool  # True if the client requests a stream
    stop_sequences: list[str]  # the client's stop sequences
    input_tokens: int  # estimated number of prompt tokens
    message_id: str  # new id for the message in the response

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse the body of `POST /v1/messages` and translate it to a chat request.

        Raises:
            ApiError: 400 `malformed_json`, `missing_model_field` or `invalid_anthropic_body`; 404 `thread_not_found` if
                the request continues a stored conversation, because the gateway stores none.
        """
        request = read_object(body)
        chat = to_chat(request)
        return cls(
            body=to_json(chat),
            model=chat["model"],
            stream=chat.get("stream", False),
            stop_sequences=stop_sequences(request),
            input_tokens=estimate_tokens(chat),
            message_id=f"msg_{secrets.token_hex(12)}",
        )

    def events(self, request_id: str | None = None) -> MessageStream:
        """Return a translator of a streamed chat completion to Messages API events."""
        return MessageStream(
            self.model,
            self.message_id,
            input_tokens=self.input_tokens,
            stop_sequences=self.stop_sequences,
            request_id=request_id,
        )

    def translate(self, status: int, body: bytes, retry_after: int | None = None) -> bytes:
        """Translate a node's non-streaming response to the JSON body of a message.

        Raises:
            ApiError: the node returned an error (the status is the node's status), or its response is malformed (502).
        """
        message = to_message(
            read_completion(status, body, retry_after),
            self.model,
            message_id=self.message_id,
            input_tokens=self.input_tokens,
            stop_sequences=self.stop_sequences,
        )
        return as_json(message)


class AnthropicReply(TranslatedReply):
    """Translates a node's chat completion to the Messages API, and sends it."""

    stream_type = b"text/event-stream; charset=utf-8"
    keep_alive_bytes = PING

    def __init__(self, send: Send, request_id: str | None = None) -> None:
        super().__init__(send)
        # The translated request, or None before the request is parsed. As long as it is None, only an error response
        # can be sent.
        self.translation: Translation | None = None
        self._request_id = request_id
        if request_id is not None:
            self.headers.append((b"request-id", request_id.encode("latin-1", "replace")))

    def expects_stream(self) -> bool:
        """Return whether the client requests a stream."""
        return self._translation().stream

    def new_translator(self) -> MessageStream:
        """Return a translator of the node's stream to Messages API events."""
        return self._translation().events(self._request_id)

    def translate(self, status: int, body: bytes, retry_after: int | None) -> bytes:
        """Translate a node's non-streaming response to a message."""
        return self._translation().translate(status, body, retry_after)

    def error_response(self, error: ApiError) -> tuple[bytes, dict[str, str]]:
        """Return body and headers of an error response in Anthropic's format."""
        return orjson.dumps(to_anthropic_error(error, self._request_id)), error_headers(error)

    def _translation(self) -> Translation:
        assert self.translation is not None
        return self.translation
