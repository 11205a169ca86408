"""A parsed request: the client's bytes, and the fields that the gateway needs to route it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import orjson
from starlette.types import Receive

from helexa.core.errors import ApiError, invalid_body, malformed_json, missing_model
from helexa.core.fleet import Limit
from helexa.cortex.requests.fields import read_fields
from helexa.cortex.requests.rewrite import rewrite
from helexa.cortex.usage.token_limit import (
    BYTES_PER_TOKEN,
    CHAT,
    COMPLETIONS,
    LIMIT_ALIASES,
    MULTIPLIERS,
    OUTPUT_LIMITS,
    Fields,
    TokenLimit,
    read_spending,
)
from helexa.http.connections.client_disconnect import ClientGone
from helexa.http.connections.request_head import Headers

_PIECE_BYTES = 8 << 10
_USUAL_OUTPUT = 4096
_THIRD_PARTY_FIELDS = frozenset(Fields.__struct_fields__) | OUTPUT_LIMITS | LIMIT_ALIASES
_REFUSED_SPELLINGS = ("model",)


_fields = msgspec.json.Decoder(Fields)


class ClientRequest(msgspec.Struct, frozen=True):
    """One request for a model.

    Attributes:
        path: API path, on the gateway and on the node.
        headers: the client's headers.
        body: JSON in the node's API format: the client's own bytes, unless the API format was translated.
        model: requested name: a model id or an alias.
        spending: the tokens that the request can use.
        stream: True if the client requests events.
        previous: id of the stored response that the request continues; only the node knows that part of the prompt.
        strict: converts the body for third-party backends, where their format differs; else None.
        stream_options: the client's stream options, or None.
        metered: True if the gateway needs the token counts of the response, because a key pays for them.
        enforced: output limit that the budget reserved and that nodes receive; None without a budget.
        large: True if other processes do the work on the body, see `body_workers.is_large`.
    """

    path: str
    headers: Headers
    body: bytes
    model: str
    spending: TokenLimit
    stream: bool = False
    previous: str | None = None
    strict: Callable[[bytes], bytes] | None = None
    stream_options: Mapping[str, Any] | None = None
    metered: bool = False
    enforced: int | None = None
    large: bool = False

    @property
    def includes_usage(self) -> bool:
        """Whether the client requested a usage chunk in the stream."""
        return self.stream_options is not None and self.stream_options.get("include_usage") is True

    @property
    def translated(self) -> bool:
        """Whether the client uses the Messages API, whose first event contains the prompt's counts."""
        return self.strict is not None

    @property
    def streams_chunks(self) -> bool:
        """Whether the response is a stream of chat or completion chunks."""
        return self.stream and self.path in (CHAT, COMPLETIONS)

    @property
    def prompt_estimate(self) -> int:
        """Estimated prompt tokens without stored parts: a quarter of the body's bytes."""
        return max(1, len(self.body) // BYTES_PER_TOKEN)

    def tokens(self, limit: Limit | None) -> int:
        """Return the estimated tokens of prompt and answers, for limits per minute and for keys without a cap.

        Args:
            limit: the model's limit. Its output limit applies if the request states none, its input limit if the
                request continues a stored conversation.
        """
        prompt, spending = self.prompt_estimate, self.spending
        if spending.continues and limit is not None:
            prompt = max(prompt, limit.input or limit.context)
        output = (limit and limit.output) or _USUAL_OUTPUT if spending.output is None else spending.output
        return prompt + spending.answers * output

    def body_for(self, model: str, kind: str = "neuron") -> bytes:
        """Return the body for a node of this kind, with `model` as the model's name.

        A helexa node gets the client's own bytes. Only the model's name is replaced if it differs, and the output limit
        is added if a budget reserved a limit that the client does not state.

        A third-party backend gets each field once and in one spelling, so that it cannot read another model or limit
        than the gateway has checked. The gateway adds a request for the usage of a metered stream, and the reserved
        output limit under one name.

        Raises:
            ApiError: 400: the body cannot be serialized again, or a third-party backend could read another `model` in
                it.
        """
        changes: dict[str, Any] = {}
        removed: set[str] = set()
        is_neuron, limit_field = kind == "neuron", self.spending.limit_field
        if (
            self.enforced is not None
            and limit_field is not None
            and not (is_neuron and self.spending.output is not None)
        ):
            changes[limit_field] = self.enforced
        if not is_neuron:
            if self.metered and self.streams_chunks and not self.includes_usage:
                changes["stream_options"] = {**(self.stream_options or {}), "include_usage": True}
            if self.enforced is not None:
                removed = {*OUTPUT_LIMITS, *LIMIT_ALIASES, *MULTIPLIERS} - {limit_field} - self.spending.multipliers
            body = rewrite(self.body, {"model": model, **changes}, removed, _THIRD_PARTY_FIELDS, _REFUSED_SPELLINGS)
            return body if self.strict is None else self.strict(body)
        return rewrite(self.body, {"model": model, **changes}) if changes else self._naming(model)

    def _naming(self, model: str) -> bytes:
        if model == self.model:
            return self.body
        model_pattern = re.compile(rb'("model"\s*:\s*)' + re.escape(orjson.dumps(self.model)))
        match = model_pattern.search(self.body)
        if match is not None and model_pattern.search(self.body, match.end()) is None:
            renamed = b"%b%b%b" % (self.body[: match.end(1)], orjson.dumps(model), self.body[match.end() :])
            if _fields.decode(renamed).model == model:  # otherwise the single match was not the `model` member
                return renamed
        return rewrite(self.body, {"model": model})


def parse_question(path: str, headers: Headers, body: bytes) -> ClientRequest:
    """Parse the fields of a body that the gateway needs.

    Raises:
        ApiError: the body is not a JSON object, names no model, or has a number of the wrong type.
    """
    try:
        if not body.isascii():
            body.decode()  # checks the UTF-8 of skipped values, which the decoder does not check
        fields = read_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(body, error) from None
    if not isinstance(fields.model, str) or not fields.model:
        raise missing_model()
    return ClientRequest(
        path,
        headers,
        body,
        fields.model,
        read_spending(path, fields, body),
        fields.stream is True,
        fields.previous_response_id if isinstance(fields.previous_response_id, str) else None,
        stream_options=fields.stream_options if isinstance(fields.stream_options, dict) else None,
    )


def _unreadable(body: bytes, error: Exception) -> ApiError:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as decode_error:
        return malformed_json(str(decode_error))
    if not isinstance(content, dict):
        return invalid_body("the request body must be a JSON object")
    return malformed_json(str(error))


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """Return all bytes of a request's body.

    Raises:
        ApiError: 413 if the declared or received length is over `limit` bytes; 408 if the body arrives too slowly; 503
            if the server's memory for bodies is used up.
        ClientGone: the client disconnected before the end of the body.
    """
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            message = await receive()
        except TimeoutError:
            raise ApiError(408, "request_timeout", "the request body stopped arriving") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message["body"]
        if size + len(chunk) > limit:
            raise _too_large(limit)
        size += len(chunk)
        if chunks and len(chunks[-1]) < _PIECE_BYTES:  # many small objects would take a multiple of the body's size
            chunks[-1] += chunk
        else:
            chunks.append(chunk)
        if not message["more_body"]:
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the request body is larger than {limit} bytes")
