"""Embeddings of a real model through the gateway."""

import math
from typing import Any

import openai
import pytest

from clients.stack import MODEL, Stack

TEXTS = ["The cat sat on the mat.", "A kitten is sitting on a rug.", "Interest rates rose by half a percent."]


def vectors(client: openai.OpenAI, texts: Any, **fields: Any) -> list[list[float]]:
    return [item.embedding for item in client.embeddings.create(model="small", input=texts, **fields).data]


def similarity(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def test_similar_texts_have_similar_embeddings(client: openai.OpenAI) -> None:
    cat, kitten, rates = vectors(client, TEXTS)
    assert similarity(cat, kitten) > similarity(cat, rates)
    assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-5) for vector in (cat, kitten, rates))


def test_embedding_is_independent_of_batching_and_encoding(client: openai.OpenAI) -> None:
    response = client.embeddings.create(model="small", input=TEXTS, encoding_format="float")
    assert response.model == MODEL
    batched = [item.embedding for item in response.data]
    tokens = 0
    for text, vector in zip(TEXTS, batched, strict=True):
        single = client.embeddings.create(model="small", input=text)
        tokens += single.usage.prompt_tokens
        assert single.data[0].embedding == pytest.approx(vector, abs=1e-6)
    assert response.usage.prompt_tokens == tokens


def test_node_is_idle_after_an_embedding_request(stack: Stack, client: openai.OpenAI) -> None:
    vectors(client, TEXTS)
    stack.until_idle()


def test_error_of_the_node_reaches_the_client_of_the_gateway(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        vectors(client, "x", extra_body={"truncate_prompt_tokens": 8})
    assert caught.value.code == "unsupported_parameter"


def test_dimensions_shortens_and_normalizes_the_embedding(client: openai.OpenAI) -> None:
    (whole,), (short,) = vectors(client, "x"), vectors(client, "x", dimensions=8)
    norm = math.hypot(*whole[:8])
    assert short == pytest.approx([number / norm for number in whole[:8]], abs=1e-6)
