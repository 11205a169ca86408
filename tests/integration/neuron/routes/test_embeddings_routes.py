"""`/v1/embeddings` over a real socket, also with OpenAI's client, and with a fake engine."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from helexa.neuron.admission import Admission
from helexa.neuron.config import AdmissionConfig
from helexa.neuron.routes import tokens_and_embeddings
from neuron.scripted_engine import CONTEXT, MODEL, TOKENIZER, answer
from neuron.scripted_node import Node, serve

ASK: dict[str, Any] = {"model": MODEL, "input": "abc"}


@dataclass
class Vector:
    """An embedding from the engine."""

    vector: list[float]
    error: str | None = None
    retry: bool = False


class Embedder:
    """A fake engine: an embedding consists of the prompt's length and first token. Records all requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.vector: Vector | None = None
        self.waits = False
        self.together = self.most_together = 0
        self.fails_at: int | None = None
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def embed(self, prompt: list[int], **settings: Any) -> Vector:
        self.requests.append({"prompt": prompt, **settings})
        self.begun.set()
        if len(self.requests) == self.fails_at:
            return Vector([], "it broke")
        self.together += 1
        self.most_together = max(self.together, self.most_together)
        await asyncio.sleep(0)
        self.together -= 1
        if self.waits:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return self.vector or Vector([float(len(prompt)), float(prompt[0]), 0.0])


@pytest.fixture
async def node() -> AsyncGenerator[Node, None]:
    async with serve(answer(""), routes=tokens_and_embeddings.routes) as node:
        node.engine.embedder = Embedder()
        node.engine.embed = node.engine.embedder.embed
        yield node


def unit(*values: float) -> list[float]:
    length = math.hypot(*values)
    return [value / length for value in values]


async def test_embeddings_have_unit_length(node: Node) -> None:
    ids = TOKENIZER.encode("abc")
    reply = await node.openai.embeddings.create(model=MODEL, input=["abc", "z"], encoding_format="float")
    assert [item.index for item in reply.data] == [0, 1]
    assert reply.data[0].embedding == pytest.approx(unit(3, ids[0], 0))
    assert reply.data[1].embedding == pytest.approx(unit(1, TOKENIZER.encode("z")[0], 0))
    assert (reply.model, reply.usage.prompt_tokens, reply.usage.total_tokens) == (MODEL, 4, 4)
    assert [request["prompt"] for request in node.engine.embedder.requests] == [ids, TOKENIZER.encode("z")]
    assert {request["pooling"] for request in node.engine.embedder.requests} == {"mean"}


@pytest.mark.parametrize(("mine", "together"), [(0, 4), (1, 1), (3, 3)])
async def test_texts_of_an_embedding_request_run_concurrently_within_the_admission_limits(
    node: Node, mine: int, together: int
) -> None:
    """A batch is served even if it has more texts than the limit of requests per principal."""
    node.model.admission = Admission(AdmissionConfig(max_per_principal=mine), node.model.engine)
    texts = ["x" * length for length in range(1, 40)]
    headers = {"x-helexa-account-id": "acme", "x-helexa-key-id": "anna"}
    reply = await node.openai.embeddings.create(
        model=MODEL, input=texts, encoding_format="float", extra_headers=headers
    )
    first = TOKENIZER.encode("x")[0]
    for length, item in zip(range(1, 40), reply.data, strict=True):
        assert item.embedding == pytest.approx(unit(length, first, 0))
    assert node.engine.embedder.most_together == together
    assert len(node.engine.embedder.requests) == len(texts)


async def test_tokens_embedded_before_a_failure_are_logged(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "helexa")
    node.engine.embedder.fails_at = 6
    assert (await node.error("/v1/embeddings", ASK | {"input": ["ab"] * 9}))[0] == 500
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("embedded ")]
    assert "finish_reason=error" in line and "texts=0" not in line and "texts=9" not in line


async def test_openai_client_receives_base64_encoded_embeddings_by_default(node: Node) -> None:
    packed = await node.openai.embeddings.create(model=MODEL, input="abc")
    plain = await node.openai.embeddings.create(model=MODEL, input="abc", encoding_format="float")
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, rel=1e-6)


async def test_embedding_vectors_have_the_requested_number_of_dimensions(node: Node) -> None:
    whole = await node.openai.embeddings.create(model=MODEL, input="abc", dimensions=3)
    short = await node.openai.embeddings.create(model=MODEL, input="abc", dimensions=2)
    first, second, _ = whole.data[0].embedding
    assert short.data[0].embedding == pytest.approx(
        [first / math.hypot(first, second), second / math.hypot(first, second)]
    )
    status, code, message = await node.error("/v1/embeddings", ASK | {"dimensions": 4})
    assert (status, code) == (400, "invalid_request_body") and "have 3" in message


async def test_input_of_token_ids_is_embedded_unchanged(node: Node) -> None:
    await node.openai.embeddings.create(model=MODEL, input=[[5, 6], [7]])
    assert [request["prompt"] for request in node.engine.embedder.requests] == [[5, 6], [7]]


async def test_prefix_cache_salt_of_embeddings_follows_from_the_account_headers(node: Node) -> None:
    headers = {"x-helexa-account-id": "acme", "x-helexa-key-id": "anna"}
    await node.openai.embeddings.create(model=MODEL, input="a", extra_headers=headers)
    await node.openai.embeddings.create(model=MODEL, input="a")
    first_salt, second_salt = [request["salt"] for request in node.engine.embedder.requests]
    assert len(first_salt) == 32 and second_salt == ""


@pytest.mark.parametrize(
    ("fields", "status", "code", "message"),
    [
        ({"model": "no"}, 404, "model_not_found", "'no'"),
        ({"input": [[10**6]]}, 400, "invalid_request_body", "input.0: 1000000"),
        ({"input": ["a", [1, -1]]}, 400, "invalid_request_body", "input.1: -1"),
        ({"input": "x" * (CONTEXT + 1)}, 400, "context_length_exceeded", f"maximum context length is {CONTEXT} tokens"),
        ({"dimensions": 0}, 400, "invalid_request_body", "dimensions"),
    ],
)
async def test_each_invalid_embedding_request_gets_its_status_and_error_code(
    node: Node, fields: dict[str, Any], status: int, code: str, message: str
) -> None:
    refused = await node.error("/v1/embeddings", ASK | fields)
    assert refused[:2] == (status, code)
    assert message in refused[2]
    assert not node.engine.embedder.requests


async def test_text_that_fills_the_whole_context_is_embedded(node: Node) -> None:
    status, _ = await node.post("/v1/embeddings", ASK | {"input": "x" * CONTEXT})
    assert status == 200


@pytest.mark.parametrize(
    ("vector", "status"),
    [
        (Vector([], "the engine ended", retry=True), 503),
        (Vector([], "it broke"), 500),
        (Vector([]), 500),
        (Vector([0.0, 0.0]), 500),
        (Vector([1.0, math.nan]), 500),
    ],
)
async def test_failed_or_invalid_vector_of_the_engine_is_an_error_response(
    node: Node, vector: Vector, status: int
) -> None:
    node.engine.embedder.vector = vector
    assert (await node.error("/v1/embeddings", ASK))[0] == status


async def test_disconnect_of_the_client_cancels_the_embedding_request_in_the_engine(node: Node) -> None:
    embedder = node.engine.embedder
    embedder.waits = True
    asking = asyncio.create_task(node.http.post(f"{node.url}/v1/embeddings", json=ASK).__aenter__())
    await embedder.begun.wait()
    asking.cancel()
    await embedder.cancelled.wait()
    embedder.waits = False
    assert (await node.openai.embeddings.create(model=MODEL, input="abc")).data  # the slot in the batch is free


async def test_embedding_request_to_a_model_without_free_slots_is_503(node: Node) -> None:
    node.engine.alive = False
    with pytest.raises(openai.APIStatusError) as refused:
        await node.openai.embeddings.create(model=MODEL, input="abc")
    assert (refused.value.status_code, refused.value.code) == (503, "service_unavailable")
