"""What embeddings ask for and are answered with."""

import base64
import json
import struct
from typing import Any

import orjson
import pytest
from openai.types import CreateEmbeddingResponse

from helexa.core.errors import ApiError
from helexa.core.wire.openai_embeddings import EmbeddingsRequest, embeddings, encoded


def asked(**fields: Any) -> EmbeddingsRequest:
    return EmbeddingsRequest.parse(json.dumps({"model": "m", **fields}).encode())


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
    ],
)
def test_inputs_are_texts_or_token_ids(given: object, read: object) -> None:
    assert asked(input=given).input == read


@pytest.mark.parametrize("given", [None, "", [], [""], [[]], ["a", ""], [1.5], [True], {"a": 1}, ["a"] * 2049])
def test_other_inputs_are_refused(given: object) -> None:
    with pytest.raises(ApiError) as refused:
        asked(input=given)
    assert (refused.value.code, refused.value.param) == ("invalid_request_body", "input")


@pytest.mark.parametrize("fields", [{"dimensions": 64}, {"truncate_prompt_tokens": 9}])
def test_nothing_is_cut(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ApiError, match=f"'{name}'") as refused:
        asked(input="a", **fields)
    assert refused.value.code == "unsupported_parameter"


@pytest.mark.parametrize("encoding", ["float", None])
def test_a_vector_is_numbers(encoding: str | None) -> None:
    reply = embeddings("m", [encoded(vector, encoding) for vector in ([0.5, -1.0], [0.0, 1.0])], 7)
    read = CreateEmbeddingResponse.model_validate_json(orjson.dumps(reply), strict=True)
    assert [(one.index, one.embedding) for one in read.data] == [(0, [0.5, -1.0]), (1, [0.0, 1.0])]
    assert (read.usage.prompt_tokens, read.usage.total_tokens) == (7, 7)


def test_a_vector_may_be_bytes() -> None:
    (one,) = json.loads(orjson.dumps(embeddings("m", [encoded([0.5, -1.0], "base64")], 7)))["data"]
    assert struct.unpack("<2f", base64.b64decode(one["embedding"])) == (0.5, -1.0)
