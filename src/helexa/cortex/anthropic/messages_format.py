"""Translates a Messages API request to a chat request, and the node's chat completion to a Messages API response."""

import secrets
from dataclasses import dataclass
from typing import Self

import orjson

from helexa.cortex.anthropic.count import estimate_tokens
from helexa.cortex.anthropic.errors import node_error
from helexa.cortex.anthropic.requests.body import read_object, to_json
from helexa.cortex.anthropic.requests.to_chat import stop_sequences, to_chat
from helexa.cortex.anthropic.responses.response import as_json, malformed, to_message
from helexa.cortex.anthropic.responses.stream import MessageStream


@dataclass(frozen=True)
class Translation:
    """A Messages API request that was translated to a chat request.

    Attributes:
        body: the chat request as JSON. It contains the client's model name.
        model: model name in the client's request, possibly an alias.
        stream: True if the client requests a stream.
        stop_sequences: the client's stop sequences.
        input_tokens: estimated number of prompt tokens.
        message_id: new id for the message in the response.
    """

    body: bytes
    model: str
    stream: bool
    stop_sequences: list[str]
    input_tokens: int
    message_id: str

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse the body of `POST /v1/messages` and translate it to a chat request.

        Raises:
            ApiError: 400 because the body is not JSON (`malformed_json`), names no model (`missing_model_field`), or
                has an invalid field (`invalid_anthropic_body`). 404 `thread_not_found` if the request continues a
                conversation that a server must store, because the gateway stores no conversations.
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
        """Return a new `MessageStream`, which translates a streamed chat completion to Messages API events."""
        return MessageStream(
            self.model,
            self.message_id,
            input_tokens=self.input_tokens,
            stop_sequences=self.stop_sequences,
            request_id=request_id,
        )

    def translate(self, status: int, body: bytes, retry_after: int | None = None) -> bytes:
        """Translate a node's non-streaming response to the JSON body of a Messages API response.

        Args:
            status: HTTP status of the node's response.
            body: body of the node's response.
            retry_after: seconds of the node's `Retry-After` header, or None.

        Raises:
            ApiError: the node returned an error (the status is the node's status), or its response is malformed (502).
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
