"""Embeddings through the gateway, of a real model."""

import math
from typing import Any

import openai
import pytest

from clients.stack import MODEL, Stack

TEXTS = ["The cat sat on the mat.", "A kitten is sitting on a rug.", "Interest rates rose by half a percent."]


def vectors(client: openai.OpenAI, texts: Any, **fields: Any) -> list[list[float]]:
    return [one.embedding for one in client.embeddings.create(model="small", input=texts, **fields).data]


def alike(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_what_means_the_same_is_near(client: openai.OpenAI) -> None:
    cat, kitten, rates = vectors(client, TEXTS)
    assert alike(cat, kitten) > alike(cat, rates)
    assert all(math.hypot(*vector) == pytest.approx(1, abs=1e-5) for vector in (cat, kitten, rates))


def test_a_text_has_one_vector_however_it_is_asked_for(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="small", input=TEXTS, encoding_format="float")
    assert reply.model == MODEL
    together = [one.embedding for one in reply.data]
    tokens = 0
    for text, vector in zip(TEXTS, together, strict=True):
        alone = client.embeddings.create(model="small", input=text)
        tokens += alone.usage.prompt_tokens
        assert alone.data[0].embedding == pytest.approx(vector, abs=1e-6)
    assert reply.usage.prompt_tokens == tokens


def test_nothing_is_left_of_a_request(stack: Stack, client: openai.OpenAI) -> None:
    vectors(client, TEXTS)
    stack.until_idle()


def test_refusals_come_through(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        vectors(client, "x", dimensions=8)
    assert refused.value.code == "unsupported_parameter"
