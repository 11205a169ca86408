"""A client request: its body, and the fields of the body that the gateway needs."""

import re
from collections.abc import Collection, Mapping
from typing import Any, cast

import msgspec
import orjson
from msgspec.structs import replace

from helexa.core.errors import ApiError, invalid_body, malformed_json, missing_model
from helexa.core.node_reports import Limit
from helexa.core.wire.request import without_lone_surrogates
from helexa.cortex.forwarding.request_body_limit_and_workers import is_large
from helexa.cortex.forwarding.token_bounds import (
    CHAT,
    COMPLETIONS,
    LIMIT_ALIASES,
    MULTIPLIERS,
    NO_IMAGES,
    OUTPUT_LIMITS,
    Fields,
    PromptImages,
    TokenLimit,
    has_media,
    read_token_limit,
)
from helexa.cortex.upstream.usage_meter import BYTES_PER_TOKEN
from helexa.http.headers import Headers


class _ModelName:
    """The value, of any JSON type, of the key `model` in a request body."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _CheckedFields(Fields, kw_only=True):
    # The type is not optional, because for null in an optional field, the decoder would not call `_count_model`.
    model: _ModelName = cast(_ModelName, None)


class _FieldsReader:
    r"""Reads fields of a request body, and rejects a body with the key `model` twice.

    The JSON decoder calls a hook for each key `model`, also if its letters are escaped, as in `\u006dodel`.
    """

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_CheckedFields, dec_hook=self._count_model)
        self._model_count = 0

    def read(self, body: bytes) -> Fields:
        """Return the fields of the body that the gateway needs.

        Raises:
            ApiError: 400 if the body contains the key `model` twice.
            msgspec.DecodeError: the body is not a JSON object.
        """
        self._model_count = 0
        fields: Fields = self._decoder.decode(body)
        if fields.model is not None:
            fields.model = fields.model.value
        return fields

    def _count_model(self, value_type: type, value: Any) -> _ModelName:
        self._model_count += 1
        # Of a repeated key, some decoders use the first value and others the last. A node could use another model than
        # the model that the gateway has authorized.
        if self._model_count > 1:
            raise invalid_body("the field 'model' is given more than once; send the field once", "model")
        return _ModelName(value)


read_fields = _FieldsReader().read


_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def rewrite(
    body: bytes,
    changes: Mapping[str, Any],
    drop: Collection[str] = (),
    known: Collection[str] = (),
    rejected: Collection[str] = (),
) -> bytes:
    """Return a request body with fields in `changes` set and fields in `drop` removed.

    Of a repeated field, the last value is kept. Fields whose names differ only by letter case from a name in `changes`,
    `drop` or `known` are removed, because some servers ignore letter case: Go's JSON decoder reads `MAX_TOKENS` as
    `max_tokens`.

    Raises:
        ApiError: 400 because `body` is not a JSON object, or because a field name differs only by letter case from a
            name in `rejected`.
    """
    try:
        fields = _raw_fields.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed_json(str(error)) from None
    if rejected:
        for name in fields:
            if name not in rejected and name.casefold() in rejected:
                raise invalid_body(
                    f"the field '{name[:100]}' is not supported; '{name.casefold()}' must be written in lower case",
                    name.casefold(),
                )
    replaced = {*changes, *drop}
    remaining_fields: dict[str, Any] = {
        name: value
        for name, value in fields.items()
        if name in known or ((folded := name.casefold()) not in replaced and folded not in known)
    }
    for name in drop:
        remaining_fields.pop(name, None)
    return msgspec.json.encode(remaining_fields | dict(changes))


_TYPICAL_OUTPUT = 4096
_THIRD_PARTY_FIELDS = frozenset(Fields.__struct_fields__) | OUTPUT_LIMITS | LIMIT_ALIASES | {"messages"}
_REJECTED_SPELLINGS = ("model",)


_fields = msgspec.json.Decoder(Fields)


class ClientRequest(msgspec.Struct, frozen=True):
    """One client request for a model."""

    path: str  # API path of the request. It is the same on the gateway and on the node.
    headers: Headers  # the client's headers
    # JSON body in the node's API format. If the gateway did not translate the request, these are the client's bytes.
    body: bytes
    model: str  # requested model name: a model id or an alias
    spending: TokenLimit  # the settings of the request that limit how many tokens it can use
    stream: bool = False  # True if the client requests an event stream
    # Id of the stored response that the request continues or refers to. None if it refers to no stored response.
    previous: str | None = None
    translated: bool = False  # True if the gateway translated a request of another API to a chat request
    stream_options: Mapping[str, Any] | None = None  # the client's `stream_options`; None if they are not an object
    metered: bool = False  # True if the gateway needs the response's token counts, because it charges them to a key
    # Maximum number of output tokens that was reserved from the key's budget. The gateway sends this limit to the node.
    # None if no output limit is enforced.
    enforced: int | None = None
    large: bool = False  # True if the body is large. Worker processes then parse and rewrite the body.
    images: PromptImages = NO_IMAGES
    has_media: bool = True  # False if the body certainly contains no image or file

    @property
    def includes_usage(self) -> bool:
        """Whether the client requested a usage chunk in the stream."""
        return self.stream_options is not None and self.stream_options.get("include_usage") is True

    @property
    def streams_chunks(self) -> bool:
        """Whether the response is a stream of chat or text completion chunks."""
        return self.stream and self.path in (CHAT, COMPLETIONS)

    @property
    def requests_usage(self) -> bool:
        """Whether the gateway requests usage although the client did not."""
        return self.metered and self.streams_chunks and not self.includes_usage

    @property
    def adds_stream_options(self) -> bool:
        """Whether the gateway adds `stream_options`, which some backends reject."""
        return self.requests_usage and self.stream_options is None

    @property
    def text_bytes(self) -> int:
        """Length of the body in bytes, without the data URLs of images."""
        return len(self.body) - self.images.url_bytes

    @property
    def prompt_estimate(self) -> int:
        """Estimated prompt tokens, without the tokens of a stored conversation."""
        return max(1, self.text_bytes // BYTES_PER_TOKEN + self.images.tokens)

    def with_images(self, body: bytes, images: PromptImages) -> "ClientRequest":
        """Return the request with `body`, whose `images` were checked or fetched.

        The data URLs of the images no longer count as text of the prompt.
        """
        added_bytes = len(body) - images.url_bytes - self.text_bytes
        spending = replace(self.spending, prompt=self.spending.prompt + added_bytes)
        return replace(self, body=body, images=images, spending=spending, large=is_large(body))

    def tokens(self, limit: Limit | None) -> int:
        """Return the estimated number of tokens of the prompt and all completions.

        `limit` has the model's token limits. If the request sets no output limit, the model's output limit is assumed,
        or `_TYPICAL_OUTPUT` if it is unknown.
        If the request continues a stored conversation, a prompt of the model's input limit is assumed.
        """
        prompt, spending = self.prompt_estimate, self.spending
        if spending.continues and limit is not None:
            prompt = max(prompt, limit.input or limit.context)
        output = (limit and limit.output) or _TYPICAL_OUTPUT if spending.output is None else spending.output
        return prompt + spending.completions * output

    def body_for(self, model: str, kind: str = "neuron") -> bytes:
        """Return the body to send to a node of `kind`, with `model` as the model's name.

        * A helexa node (kind `neuron`) receives the client's bytes, except for the model name and the reserved output
          limit.
        * A third-party backend receives each field once and in one spelling, so it cannot use another model or limit
          than the gateway has checked. A reserved output limit is sent in one field only. If the stream's tokens are
          charged, the gateway also requests a usage chunk.

        Raises:
            ApiError: 400: the body cannot be parsed, or contains the key `model` in other letter case, such as `Model`.
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
            if self.requests_usage:
                changes["stream_options"] = {**(self.stream_options or {}), "include_usage": True}
            if self.enforced is not None:
                removed = {*OUTPUT_LIMITS, *LIMIT_ALIASES, *MULTIPLIERS} - {limit_field} - self.spending.multipliers
            elif self.spending.output is None and limit_field == "max_tokens":
                # The client may have set these fields to -1 (no limit), which OpenAI's API and vLLM reject.
                removed = {"max_tokens", "max_completion_tokens"}
            return rewrite(self.body, {"model": model, **changes}, removed, _THIRD_PARTY_FIELDS, _REJECTED_SPELLINGS)
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
    """Parse the fields of a body that the gateway needs, and return the request.

    Lone surrogates in the body are replaced. `translated`, `metered`, `enforced`, `large` and `images` have defaults.

    Raises:
        ApiError: 400 if the body is not a JSON object, names no model, or has an invalid value in a field that the
            gateway reads.
    """
    try:
        if not body.isascii():
            body.decode()  # the decoder does not check the UTF-8 of skipped values
        fields = read_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if (repaired := without_lone_surrogates(body)) != body:
            return parse_request(path, headers, repaired)
        raise _parse_error(body, error) from None
    if not isinstance(fields.model, str) or not fields.model:
        raise missing_model()
    spending = read_token_limit(path, fields, body)
    return ClientRequest(
        path,
        headers,
        body,
        fields.model,
        spending,
        fields.stream is True,
        spending.stored,
        stream_options=fields.stream_options if isinstance(fields.stream_options, dict) else None,
        has_media=has_media(body),
    )


def _parse_error(body: bytes, error: Exception) -> ApiError:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as decode_error:
        return malformed_json(str(decode_error))
    if not isinstance(content, dict):
        return invalid_body("the request body must be a JSON object")
    return malformed_json(str(error))
