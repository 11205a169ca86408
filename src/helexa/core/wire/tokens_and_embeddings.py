"""Bodies of `/tokenize`, `/detokenize`, `/tokenizer_info` and `/v1/embeddings`."""

import base64
import math
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import orjson
from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from helexa.core.errors import invalid_body, unsupported_parameter
from helexa.core.wire.chat_message import ChatMessage
from helexa.core.wire.openai_chat import Tools, both_endings, check_tools, tools_for_template
from helexa.core.wire.request import WireRequest

# OpenAI's maximum number of texts in an embeddings request.
MAX_INPUTS = 2048

_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[int], Field(min_length=1)]
_Bounds = Field(min_length=1, max_length=MAX_INPUTS)
_Input = _Text | _Ids | Annotated[list[_Text], _Bounds] | Annotated[list[_Ids], _Bounds]


class TokenizeRequest(WireRequest):
    """The body of `POST /tokenize`: a text (`prompt`) or a chat (`messages`)."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @property
    def has_image(self) -> bool:
        """Whether a message contains an image."""
        return any(message.has_image for message in self.messages or ())

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools in the format that chat templates expect."""
        return tools_for_template(self.tools or ())

    @property
    def thinks(self) -> bool:
        """Whether the template variable `enable_thinking` is true."""
        return (self.chat_template_kwargs or {}).get("enable_thinking") is True

    def reject_unsupported(self) -> None:
        """Reject unsupported parameters. Require either `prompt` or `messages`.

        If `continue_final_message` is true and `add_generation_prompt` is not set, set the latter to False.
        """
        if (self.prompt is None) == (self.messages is None):
            raise invalid_body("exactly one of 'prompt' and 'messages' is required; send a text or a chat")
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise both_endings()
            self.add_generation_prompt = False
        if self.messages is not None and self.add_special_tokens:
            raise unsupported_parameter(
                "add_special_tokens",
                "'add_special_tokens' cannot be true with 'messages': the chat template adds special tokens; "
                "leave the field out",
            )
        check_tools(self.tools or ())
        if self.extra("chat_template"):
            raise unsupported_parameter("chat_template")
        for name in ("messages", "tools"):
            if name in (self.chat_template_kwargs or {}):
                raise unsupported_parameter(f"chat_template_kwargs.{name}")


class DetokenizeRequest(WireRequest):
    """The body of `POST /detokenize`: token ids to convert to text."""

    tokens: list[int]


class Tokens(TypedDict):
    """The response of `POST /tokenize`.

    If requested, `token_strs` contains each token as written in the vocabulary.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str | None]]


class Detokenized(TypedDict):
    """The response of `POST /detokenize`: the text, including control tokens."""

    prompt: str


def _inputs(value: Any) -> list[str | list[int]]:
    """Check the field `input`, and return it as a list.

    Each element is a non-empty text or list of token ids.
    """
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError(
            "input", "the input must be a string, a list of token ids, or a list of strings or of lists of token ids"
        )
    if len(value) > MAX_INPUTS:
        raise PydanticCustomError(
            "input", "the input has more than {most} texts; send several requests", {"most": MAX_INPUTS}
        )
    for index, item in enumerate(value):
        if not isinstance(item, str) and not _is_ids(item):
            raise PydanticCustomError(
                "input", "item {index} of the input is neither a string nor a list of token ids", {"index": index}
            )
        if not item:
            raise PydanticCustomError(
                "input", "item {index} of the input is empty; leave this item out", {"index": index}
            )
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(item) is int for item in value)


class EmbeddingsRequest(WireRequest):
    """The body of `POST /v1/embeddings`."""

    input: Annotated[list[str | list[int]], PlainValidator(_inputs, json_schema_input_type=_Input)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None

    def reject_unsupported(self) -> None:
        """Reject `truncate_prompt_tokens`, which would truncate the texts."""
        if self.extra("truncate_prompt_tokens") is not None:
            raise unsupported_parameter("truncate_prompt_tokens")


class EmbeddingData(TypedDict):
    """The embedding of one text: numbers, or float32 bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: orjson.Fragment


class EmbeddingsUsage(TypedDict):
    """The `usage` object of an embeddings response: the tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """The body of the response to `POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingsUsage


def embeddings(model: str, vectors: Sequence[bytes], tokens: int) -> Embeddings:
    """Return the response body for `vectors`, one JSON-encoded embedding per text."""
    return Embeddings(
        object="list",
        data=[
            EmbeddingData(object="embedding", index=index, embedding=orjson.Fragment(vector))
            for index, vector in enumerate(vectors)
        ],
        model=model,
        usage=EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens),
    )


def shortened(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """Return the first `dimensions` numbers of an embedding, normalized to length 1.

    If `dimensions` is None or the length of `vector`, return `vector` unchanged.

    Raises:
        ApiError: 400 `invalid_request_body`: the embedding has fewer numbers.
    """
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise invalid_body(
            f"dimensions: is {dimensions}, but the model's embeddings have {len(vector)}; send a smaller number",
            "dimensions",
        )
    # Clients compare embeddings by their scalar product, so the length must be 1, as in OpenAI's API.
    norm = math.hypot(*vector[:dimensions])
    return [number / norm for number in vector[:dimensions]] if norm else vector[:dimensions]


def encoded(vector: Sequence[float], encoding: str | None) -> bytes:
    """Return an embedding as JSON: a string if `encoding` is `base64`, else numbers."""
    if encoding == "base64":
        return b'"%s"' % base64.b64encode(struct.pack(f"<{len(vector)}f", *vector))
    return orjson.dumps(vector)
