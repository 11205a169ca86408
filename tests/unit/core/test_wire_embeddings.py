"""Parsing of embeddings requests, and their responses."""

import base64
import json
import struct
from typing import Any

import orjson
import pytest
from openai.types import CreateEmbeddingResponse

from helexa.core.errors import ApiError
from helexa.core.wire.tokens_and_embeddings import EmbeddingsRequest, embeddings, encoded, shortened


def parse(**fields: Any) -> EmbeddingsRequest:
    return EmbeddingsRequest.parse(json.dumps({"model": "m", **fields}).encode())


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
    ],
)
def test_embedding_inputs_may_be_texts_or_token_ids(value: object, inputs: object) -> None:
    assert parse(input=value).input == inputs


@pytest.mark.parametrize("value", [None, "", [], [""], [[]], ["a", ""], [1.5], [True], {"a": 1}, ["a"] * 2049])
def test_empty_or_mistyped_embedding_inputs_are_rejected(value: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse(input=value)
    assert (caught.value.code, caught.value.param) == ("invalid_request_body", "input")


def test_request_to_truncate_texts_is_rejected() -> None:
    with pytest.raises(ApiError, match="'truncate_prompt_tokens'") as caught:
        parse(input="a", truncate_prompt_tokens=9)
    assert caught.value.code == "unsupported_parameter"


def test_shortened_embeddings_have_length_1() -> None:
    """Some clients always send the dimensions of the model."""
    vector = [0.6, 0.0, 0.8]
    assert shortened(vector, None) == shortened(vector, 3) == vector
    assert shortened([0.48, 0.64, 0.6], 2) == pytest.approx([0.6, 0.8])
    assert shortened([0.0, 1.0], 1) == [0.0]
    with pytest.raises(ApiError, match="have 3") as caught:
        shortened(vector, 4)
    assert (caught.value.status, caught.value.param) == (400, "dimensions")
    for dimensions in (0, "3", 2.5):
        with pytest.raises(ApiError, match="dimensions"):
            parse(input="a", dimensions=dimensions)


@pytest.mark.parametrize("encoding", ["float", None])
def test_embeddings_without_an_encoding_or_with_float_are_lists_of_numbers(encoding: str | None) -> None:
    body = embeddings("m", [encoded(vector, encoding) for vector in ([0.5, -1.0], [0.0, 1.0])], 7)
    response = CreateEmbeddingResponse.model_validate_json(orjson.dumps(body), strict=True)
    assert [(item.index, item.embedding) for item in response.data] == [(0, [0.5, -1.0]), (1, [0.0, 1.0])]
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (7, 7)


def test_base64_encoding_returns_little_endian_floats() -> None:
    (item,) = json.loads(orjson.dumps(embeddings("m", [encoded([0.5, -1.0], "base64")], 7)))["data"]
    assert struct.unpack("<2f", base64.b64decode(item["embedding"])) == (0.5, -1.0)
