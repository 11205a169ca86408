"""Ollama's Python library with a real model behind the gateway."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any, Literal

import ollama
import openai
import pydantic
import pytest

from clients.stack import MODEL, Stack

FRANCE: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[ollama.Client]:
    with ollama.Client(stack.url, trust_env=False) as client:
        yield client


def test_streamed_ollama_answer_equals_the_complete_answer(client: ollama.Client):
    answer = client.chat("small", FRANCE, options=GREEDY)
    assert "Paris" in (answer.message.content or "")
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "small")
    assert (answer.prompt_eval_count or 0) > (answer.eval_count or 0) > 0
    assert (answer.total_duration or 0) >= (answer.eval_duration or 0) > 0
    *parts, last = client.chat("small", FRANCE, options=GREEDY, stream=True)
    assert "".join(part.message.content or "" for part in parts) == answer.message.content
    assert [part.done for part in parts] == [False] * len(parts)
    assert (last.eval_count, last.prompt_eval_count) == (answer.eval_count, answer.prompt_eval_count)


def test_options_num_predict_and_stop_end_an_answer(client: ollama.Client):
    cut = client.chat("small", FRANCE, options=GREEDY | {"num_predict": 2})
    assert (cut.done_reason, cut.eval_count) == ("length", 2)
    stopped = client.chat("small", FRANCE, options=GREEDY | {"stop": ["Paris"]})
    assert (stopped.done_reason, "Paris" in (stopped.message.content or "")) == ("stop", False)


def test_ollama_generate_applies_the_chat_template_unless_the_field_raw_is_set(client: ollama.Client):
    question = FRANCE[0]["content"]
    answer = client.generate("small", question, options=GREEDY)
    assert answer.response == client.chat("small", FRANCE, options=GREEDY).message.content
    raw = client.generate("small", "The capital of France is", raw=True, options=GREEDY | {"num_predict": 3})
    assert "Paris" in (raw.response or "")
    parts = client.generate("small", "The capital of France is", raw=True, options=GREEDY, stream=True, logprobs=True)
    assert "Paris" in "".join(part.response or "" for part in parts)


def test_answer_follows_the_json_schema_in_format(client: ollama.Client):
    class Person(pydantic.BaseModel):
        name: Literal["Ada", "Bob"]

    messages = [{"role": "user", "content": "My name is Ada. Answer as JSON."}]
    answer = client.chat("small", messages, format=Person.model_json_schema(), options=GREEDY)
    assert Person.model_validate_json(answer.message.content or "").name


def test_log_probabilities_belong_to_the_tokens_of_the_answer(client: ollama.Client):
    answer = client.chat("small", FRANCE, logprobs=True, top_logprobs=2, options=GREEDY | {"num_predict": 2})
    tokens = answer.logprobs or []
    assert "".join(token.token for token in tokens) == answer.message.content
    assert all(len(token.top_logprobs or []) == 2 and math.exp(token.logprob) <= 1 for token in tokens)


def test_embeddings_equal_those_of_the_openai_api(client: ollama.Client, stack: Stack):
    texts = ["The sky is blue", "Grass is green"]
    answer = client.embed("small", texts)
    with stack.client() as other:
        expected: openai.types.CreateEmbeddingResponse = other.embeddings.create(
            model="small", input=texts, encoding_format="float"
        )
    assert [list(vector) for vector in answer.embeddings] == [item.embedding for item in expected.data]
    assert answer.prompt_eval_count == expected.usage.prompt_tokens
    assert client.embeddings("small", texts[0]).embedding == answer.embeddings[0]
    (short,) = client.embed("small", texts[0], dimensions=8).embeddings
    assert (len(short), math.fsum(x * x for x in short)) == (8, pytest.approx(1))


def test_ollama_client_lists_models_and_shows_their_properties(client: ollama.Client):
    names = {model.model for model in client.list().models}
    assert {MODEL, "small"} <= names
    shown = client.show("small:latest")
    assert shown.capabilities == ["completion"]
    assert shown.details is not None and shown.details.family == "llama"
    assert shown.modelinfo is not None and shown.modelinfo["llama.context_length"] > 0
    (running,) = client.ps().models
    assert (running.model, (running.context_length or 0) > 0, (running.size or 0) > 0) == (MODEL, True, True)
    assert client.pull("small").status == "success"


def test_errors_reach_the_ollama_client_with_their_status_and_message(client: ollama.Client):
    with pytest.raises(ollama.ResponseError, match="model 'does-not-yet-exist' not found") as caught:
        client.chat("does-not-yet-exist")
    assert caught.value.status_code == 404

    def population(city: str) -> int:
        """Return the number of people in a city.

        Args:
            city: name of the city
        """
        return len(city)

    with pytest.raises(ollama.ResponseError, match="does not support tools"):
        list(client.chat("small", FRANCE, tools=[population], stream=True))
    with pytest.raises(ollama.ResponseError, match="reads text only"):
        client.chat("small", [{"role": "user", "content": "What?", "images": [b"no image"]}])
    with pytest.raises(ollama.ResponseError, match="creates no models"):
        client.create("example", from_="small")


def test_closing_the_stream_ends_the_request_in_the_engine(client: ollama.Client, stack: Stack):
    stream = client.generate("small", "Tell a very long story.", stream=True)
    next(iter(stream))
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    stack.until_idle()


def test_async_client_streams_the_answer(stack: Stack):
    async def ask() -> str:
        async with ollama.AsyncClient(stack.url, trust_env=False) as client:
            parts = await client.chat("small", FRANCE, options=GREEDY, stream=True)
            return "".join([part.message.content or "" async for part in parts])

    assert "Paris" in asyncio.run(ask())
