"""A client request: the bytes of its body, and the fields that the gateway needs."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import orjson
from msgspec.structs import replace
from starlette.types import Receive

from helexa.core.errors import ApiError, invalid_body, malformed_json, missing_model
from helexa.core.fleet import Limit
from helexa.cortex.requests.body_workers import is_large
from helexa.cortex.requests.fields import read_fields
from helexa.cortex.requests.rewrite import rewrite
from helexa.cortex.usage.media_tokens import NO_IMAGES, PromptImages
from helexa.cortex.usage.token_limit import (
    BYTES_PER_TOKEN,
    CHAT,
    COMPLETIONS,
    LIMIT_ALIASES,
    MULTIPLIERS,
    OUTPUT_LIMITS,
    Fields,
    TokenLimit,
    read_token_limit,
)
from helexa.http.connections.client_disconnect import ClientDisconnected
from helexa.http.connections.request_head import Headers, require_json

MAX_JSON_BYTES = 256 << 10
"""Maximum length of the body of an administration request."""

_MIN_CHUNK_BYTES = 8 << 10
_TYPICAL_OUTPUT = 4096
_THIRD_PARTY_FIELDS = frozenset(Fields.__struct_fields__) | OUTPUT_LIMITS | LIMIT_ALIASES | {"messages"}
_REJECTED_SPELLINGS = ("model",)


_fields = msgspec.json.Decoder(Fields)


class ClientRequest(msgspec.Struct, frozen=True):
    """One client request for a model.

    Attributes:
        path: API path of the request. It is the same on the gateway and on the node.
        headers: the client's headers.
        body: JSON body in the node's API format. If the gateway did not translate the request, these are the client's
            bytes.
        model: requested model name: a model id or an alias.
        spending: the settings of the request that limit how many tokens it can use.
        stream: True if the client requests an event stream.
        previous: id of the stored response that the request continues, or None. The response is stored on one node.
        strict: function that converts a translated body for third-party backends. None if the body was not translated.
        stream_options: the client's stream options, or None.
        metered: True if the gateway needs the response's token counts, because it charges them to a key.
        enforced: maximum number of output tokens that was reserved from the key's budget. The gateway sends this limit
            to the node. None if no output limit is enforced.
        large: True if the body is large. Worker processes then parse and rewrite the body.
        images: the images in the prompt.
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
    images: PromptImages = NO_IMAGES

    @property
    def includes_usage(self) -> bool:
        """Whether the client requested a usage chunk in the stream."""
        return self.stream_options is not None and self.stream_options.get("include_usage") is True

    @property
    def translated(self) -> bool:
        """Whether the gateway translated the request from the Messages API."""
        return self.strict is not None

    @property
    def streams_chunks(self) -> bool:
        """Whether the response is a stream in the format of `/v1/chat/completions` or `/v1/completions`."""
        return self.stream and self.path in (CHAT, COMPLETIONS)

    @property
    def text_bytes(self) -> int:
        """Length of the body in bytes, without the data URLs of images."""
        return len(self.body) - self.images.url_bytes

    @property
    def prompt_estimate(self) -> int:
        """Estimated number of prompt tokens: a quarter of the body's bytes, and a typical number for each image.

        If the request continues a stored conversation, the tokens of the conversation are not included.
        """
        return max(1, self.text_bytes // BYTES_PER_TOKEN + self.images.tokens)

    def with_images(self, body: bytes, images: PromptImages) -> "ClientRequest":
        """Return the request with `body` as its body, after the images in the body were checked or fetched.

        The data URLs of the images no longer count as text of the prompt.
        """
        added_bytes = len(body) - images.url_bytes - self.text_bytes
        spending = replace(self.spending, prompt=self.spending.prompt + added_bytes)
        return replace(self, body=body, images=images, spending=spending, large=is_large(body))

    def tokens(self, limit: Limit | None) -> int:
        """Return the estimated number of tokens of the prompt and all completions.

        The estimate is used for tokens-per-minute limits, and for the reservation of keys without a cap.

        Args:
            limit: the model's token limits. Its output limit is used if the request has no output limit. Its input
                limit is used as the prompt's length if the request continues a stored conversation.
        """
        prompt, spending = self.prompt_estimate, self.spending
        if spending.continues and limit is not None:
            prompt = max(prompt, limit.input or limit.context)
        output = (limit and limit.output) or _TYPICAL_OUTPUT if spending.output is None else spending.output
        return prompt + spending.completions * output

    def body_for(self, model: str, kind: str = "neuron") -> bytes:
        """Return the body to send to a node of the kind `kind`, with `model` as the name of the model.

        A helexa node (kind `neuron`) receives the client's bytes with at most two changes. The model name is replaced
        if it differs from `model`. The reserved output limit is added if the request has no output limit.

        A third-party backend receives each field once and in one spelling. It therefore cannot use another model or
        limit than the gateway has checked. A reserved output limit is sent in one field only. If the stream's tokens
        are charged, the gateway also requests a usage chunk.

        Raises:
            ApiError: 400: the body cannot be serialized again, or contains `model` in other letter case.
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
            body = rewrite(self.body, {"model": model, **changes}, removed, _THIRD_PARTY_FIELDS, _REJECTED_SPELLINGS)
            return body if self.strict is None else self.strict(body)
        return rewrite(self.body, {"model": model, **changes}) if changes else self._with_model(model)

    def _with_model(self, model: str) -> bytes:
        if model == self.model:
            return self.body
        model_pattern = re.compile(rb'("model"\s*:\s*)' + re.escape(orjson.dumps(self.model)))
        match = model_pattern.search(self.body)
        if match is not None and model_pattern.search(self.body, match.end()) is None:
            renamed_body = b"%b%b%b" % (self.body[: match.end(1)], orjson.dumps(model), self.body[match.end() :])
            if _fields.decode(renamed_body).model == model:  # otherwise the match was a nested `model`
                return renamed_body
        return rewrite(self.body, {"model": model})


def parse_request(path: str, headers: Headers, body: bytes) -> ClientRequest:
    """Parse the fields of a request body that the gateway needs, and return the parsed request.

    Raises:
        ApiError: 400 if the body is not a JSON object, names no model, or has an invalid value in a field that the
            gateway reads.
    """
    try:
        if not body.isascii():
            body.decode()  # the decoder does not check the UTF-8 of skipped values
        fields = read_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _parse_error(body, error) from None
    if not isinstance(fields.model, str) or not fields.model:
        raise missing_model()
    return ClientRequest(
        path,
        headers,
        body,
        fields.model,
        read_token_limit(path, fields, body),
        fields.stream is True,
        fields.previous_response_id if isinstance(fields.previous_response_id, str) else None,
        stream_options=fields.stream_options if isinstance(fields.stream_options, dict) else None,
    )


def _parse_error(body: bytes, error: Exception) -> ApiError:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as decode_error:
        return malformed_json(str(decode_error))
    if not isinstance(content, dict):
        return invalid_body("the request body must be a JSON object")
    return malformed_json(str(error))


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """Receive the whole body of a request, and return its bytes.

    Raises:
        ApiError: 413 if the declared or received length is over `limit` bytes. 408 if the client stops sending the
            body. 503 if the server's memory for request bodies is used up.
        ClientDisconnected: the client disconnected before the end of the body.
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
            raise ClientDisconnected
        chunk = message["body"]
        if size + len(chunk) > limit:
            raise _too_large(limit)
        size += len(chunk)
        if chunks and len(chunks[-1]) < _MIN_CHUNK_BYTES:  # many small chunks use much more memory
            chunks[-1] += chunk
        else:
            chunks.append(chunk)
        if not message["more_body"]:
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read_json_body(receive: Receive, headers: Headers) -> bytes:
    """Receive the body of an administration request, at most `MAX_JSON_BYTES` bytes.

    Raises:
        ApiError: 400 if the client disconnects, 408, 413 or 503 as for `read_body`, 415 if the
            headers do not describe uncompressed JSON.
    """
    require_json(headers)
    try:
        return await read_body(receive, headers, MAX_JSON_BYTES)
    except ClientDisconnected:
        raise ApiError(400, "client_disconnected", "the client disconnected while sending its request") from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the request body is larger than {limit} bytes")
