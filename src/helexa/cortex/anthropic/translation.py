"""One request of Anthropic's API on its way to a node, and what its answer must be turned into."""

import secrets
from dataclasses import dataclass
from typing import Self

import orjson

from helexa.cortex.anthropic.count import estimated_tokens
from helexa.cortex.anthropic.errors import node_error
from helexa.cortex.anthropic.requests.body import encoded, read_object
from helexa.cortex.anthropic.requests.request import stop_sequences, to_chat
from helexa.cortex.anthropic.responses.response import as_json, malformed, to_message
from helexa.cortex.anthropic.responses.stream import MessageStream


@dataclass(frozen=True)
class Translation:
    """A request, translated.

    Attributes:
        body: the chat request, as JSON; it names the model as the client did.
        model: that name.
        stream: the client wants events.
        stop_sequences: what the client wants the answer to end at.
        input_tokens: a guess of the prompt's tokens.
        message_id: of the answer.
    """

    body: bytes
    model: str
    stream: bool
    stop_sequences: list[str]
    input_tokens: int
    message_id: str

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read and translate the body of `POST /v1/messages`.

        Raises:
            ApiError: 400 `malformed_json`, `missing_model_field`, or `invalid_anthropic_body` naming the field.
        """
        request = read_object(body)
        chat = to_chat(request)
        return cls(
            body=encoded(chat),
            model=chat["model"],
            stream=chat.get("stream", False),
            stop_sequences=stop_sequences(request),
            input_tokens=estimated_tokens(chat),
            message_id=f"msg_{secrets.token_hex(12)}",
        )

    def events(self, request_id: str | None = None) -> MessageStream:
        """What turns a streamed answer into the client's events."""
        return MessageStream(
            self.model,
            self.message_id,
            input_tokens=self.input_tokens,
            stop_sequences=self.stop_sequences,
            request_id=request_id,
        )

    def whole(self, status: int, body: bytes, retry_after: int | None = None) -> bytes:
        """The message that a node's whole answer is, as JSON.

        Raises:
            ApiError: the node refused (its status, and what it meant), or its answer is malformed (502).
        """
        if not 200 <= status < 300:
            raise node_error(status, body, retry_after)
        try:
            chat = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise malformed("it is not JSON") from None
        if not isinstance(chat, dict):
            raise malformed("it is not an object")
        message = to_message(chat, self.model, message_id=self.message_id, stop_sequences=self.stop_sequences)
        return as_json(message)
