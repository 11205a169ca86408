"""Request and response bodies of OpenAI's embeddings API."""

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict

import orjson
from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from helexa.core.errors import unsupported_parameter
from helexa.core.wire.request import WireRequest

MAX_INPUTS = 2048

_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[int], Field(min_length=1)]
_Bounds = Field(min_length=1, max_length=MAX_INPUTS)
_Input = _Text | _Ids | Annotated[list[_Text], _Bounds] | Annotated[list[_Ids], _Bounds]


def _inputs(value: Any) -> list[str | list[int]]:
    """Check the field `input`, and return it as a list. Each element is a non-empty text or list of token ids."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("input", "must be a string, a list of token ids, or a list of these")
    if len(value) > MAX_INPUTS:
        raise PydanticCustomError("input", "has more than {most} texts", {"most": MAX_INPUTS})
    for index, item in enumerate(value):
        if not isinstance(item, str) and not _is_ids(item):
            raise PydanticCustomError("input", "{index} is no string and no list of token ids", {"index": index})
        if not item:
            raise PydanticCustomError("input", "{index} is empty", {"index": index})
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(type(item) is int for item in value)


class EmbeddingsRequest(WireRequest):
    """The body of `POST /v1/embeddings`."""

    input: Annotated[list[str | list[int]], PlainValidator(_inputs, json_schema_input_type=_Input)]
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None

    def reject_unsupported(self) -> None:
        """Raise an error for the unsupported parameters that would truncate the vectors or the texts."""
        for name in ("dimensions", "truncate_prompt_tokens"):
            if self.extra(name) is not None:
                raise unsupported_parameter(name)


class EmbeddingData(TypedDict):
    """The embedding of one text: a list of numbers, or little-endian float32 bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: orjson.Fragment


class EmbeddingsUsage(TypedDict):
    """The `usage` object of the response: the number of tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """The body of the response to `POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingsUsage


def embeddings(model: str, vectors: Sequence[bytes], tokens: int) -> Embeddings:
    """Return the response body for `vectors`, one JSON-encoded embedding per text.

    `tokens` is the number of tokens of all texts together.
    """
    return Embeddings(
        object="list",
        data=[
            EmbeddingData(object="embedding", index=index, embedding=orjson.Fragment(vector))
            for index, vector in enumerate(vectors)
        ],
        model=model,
        usage=EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens),
    )


def encoded(vector: Sequence[float], encoding: str | None) -> bytes:
    """Return a vector as JSON: a base64 string if `encoding` is `base64`, else a list of numbers."""
    if encoding == "base64":
        return b'"%s"' % base64.b64encode(struct.pack(f"<{len(vector)}f", *vector))
    return orjson.dumps(vector)
