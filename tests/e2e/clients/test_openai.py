"""OpenAI's official client with a real model behind the gateway."""

from collections.abc import Iterable
from typing import Any

import openai
import pytest

from clients.stack import MODEL, Stack, read

FRANCE: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def text_of(chunks: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def chat_text(client: openai.OpenAI, **fields: Any) -> str:
    arguments: Any = {"model": MODEL, "messages": FRANCE, "max_tokens": 24} | fields
    response = client.chat.completions.create(**arguments)
    return text_of(response) if fields.get("stream") else response.choices[0].message.content


@pytest.fixture(scope="module")
def greedy(client: openai.OpenAI) -> str:
    return chat_text(client, temperature=0)


def test_chat_completion_answers_in_english(client: openai.OpenAI, greedy: str):
    assert "Paris" in greedy
    response = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_tokens=64)
    (choice,) = response.choices
    assert (choice.finish_reason, choice.message.role, response.model) == ("stop", "assistant", MODEL)
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens
    assert "<|im_end|>" not in (choice.message.content or "")


def test_streamed_chat_text_equals_the_text_without_streaming(client: openai.OpenAI, greedy: str):
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=FRANCE,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert text_of(chunks) == greedy
    assert chunks[0].choices[0].delta.role == "assistant"
    *_, last, usage = chunks
    assert last.choices[0].finish_reason in ("stop", "length")
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens > 0
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_async_client_streams_the_same_text(stack: Stack, greedy: str):
    async with stack.async_client() as client:
        stream = await client.chat.completions.create(
            model="small", messages=FRANCE, temperature=0, max_tokens=24, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert text_of(chunks) == greedy


def test_equal_seeds_give_equal_texts_and_other_seeds_other_texts(client: openai.OpenAI):
    story = {"messages": [{"role": "user", "content": "Invent the name of a ship."}], "temperature": 0.8}
    first, again, different = (chat_text(client, seed=seed, **story) for seed in (7, 7, 8))
    assert first == again
    assert first != different
    assert chat_text(client, seed=7, stream=True, **story) == first


def test_token_limits_and_stop_strings_end_a_completion(client: openai.OpenAI, greedy: str):
    response = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, max_completion_tokens=3)
    assert response.choices[0].finish_reason == "length"
    assert response.usage is not None
    assert response.usage.completion_tokens == 3
    assert greedy.startswith(response.choices[0].message.content or "-")
    for stream in (False, True):
        assert (
            chat_text(client, temperature=0, stop=["never said", " Paris"], stream=stream) == greedy.split(" Paris")[0]
        )


def test_text_completion_continues_the_prompt(client: openai.OpenAI):
    fields: Any = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    complete = client.completions.create(**fields)
    assert "Paris" in complete.choices[0].text
    assert complete.usage is not None
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (5, 8)
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == complete.choices[0].text
    assert chunks[-1].usage.completion_tokens == 8
    stopped = client.completions.create(**fields, stop=".")
    assert stopped.choices[0].finish_reason == "stop"
    assert "." not in stopped.choices[0].text


def test_message_of_text_parts_gives_the_same_answer_as_plain_text(client: openai.OpenAI):
    def tokens_and_text(content: Any) -> tuple[int, str | None]:
        messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
        response = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
        assert response.usage is not None
        return response.usage.prompt_tokens, response.choices[0].message.content

    assert tokens_and_text([{"type": "text", "text": "Who are you?"}]) == tokens_and_text("Who are you?")


def test_models_are_listed_and_retrieved_by_id(client: openai.OpenAI):
    models = {model.id: model for model in client.models.list()}
    assert {MODEL, "small"} <= models.keys()
    assert client.models.retrieve(MODEL).id == MODEL


def test_time_to_first_token_of_a_chat_is_recorded_in_a_histogram(stack: Stack, client: openai.OpenAI):
    chat_text(client, temperature=0, stream=True)
    lines = read(stack.metrics_url).splitlines()
    name = "cortex_time_to_first_token_seconds_bucket{"
    buckets = [line for line in lines if line.startswith(name) and f'model="{MODEL}",node="n1"' in line]
    assert any('le="0.1"' in line for line in buckets)
    (everything,) = [float(line.split()[-1]) for line in buckets if 'le="+Inf"' in line]
    assert everything >= 1
