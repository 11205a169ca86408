"""OpenAI's Responses through the gateway, to a real model."""

from typing import Any

import openai
import pytest

from clients.stack import MODEL, Stack, read

FRANCE: Any = {"model": "small", "input": "What is the capital of France? Answer in one word.", "temperature": 0}


def test_the_model_answers_and_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(**FRANCE, max_output_tokens=24)
    assert "Paris" in whole.output_text
    assert (whole.model, whole.status) == (MODEL, "completed")
    with client.responses.stream(**FRANCE, max_output_tokens=24) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert told == final.output_text == whole.output_text
    assert final.usage is not None and whole.usage is not None
    assert (final.usage.input_tokens, final.usage.output_tokens) == (
        whole.usage.input_tokens,
        whole.usage.output_tokens,
    )


def test_a_conversation_goes_on_from_a_response(client: openai.OpenAI) -> None:
    first = client.responses.create(**FRANCE, max_output_tokens=24)
    asked = {**FRANCE, "input": "Which country is that in?", "max_output_tokens": 16}
    said = {"role": "assistant", "content": first.output_text}
    turns: Any = [{"role": "user", "content": FRANCE["input"]}, said, {"role": "user", "content": asked["input"]}]
    after = client.responses.create(**asked, previous_response_id=first.id)
    spelled = client.responses.create(**asked | {"input": turns})
    assert after.output_text == spelled.output_text
    assert after.usage is not None and spelled.usage is not None
    assert after.usage.input_tokens == spelled.usage.input_tokens


def test_what_is_kept_is_given_back_until_it_is_forgotten(client: openai.OpenAI) -> None:
    first = client.responses.create(**FRANCE, max_output_tokens=5)
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(first.id)


def test_log_probabilities_are_of_the_texts_tokens(client: openai.OpenAI) -> None:
    response = client.responses.create(
        **FRANCE, max_output_tokens=8, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    (message,) = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    told = message.content[0].logprobs or []
    assert b"".join(bytes(one.bytes) for one in told).decode() == response.output_text
    for one in told:
        likeliest, second = one.top_logprobs
        assert one.logprob == likeliest.logprob >= second.logprob  # at temperature 0


def test_an_answer_that_is_cut_says_so(client: openai.OpenAI) -> None:
    cut = client.responses.create(**FRANCE | {"input": "Tell me a long story."}, max_output_tokens=5)
    assert cut.usage is not None
    assert (cut.status, cut.usage.output_tokens) == ("incomplete", 5)
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [True, False])
def test_the_gateway_counts_what_the_response_says(stack: Stack, client: openai.OpenAI, stream: bool) -> None:
    def spent() -> float:
        lines = read(stack.metrics_url).splitlines()
        name = "cortex_completion_tokens_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = spent()
    if stream:
        *_, last = client.responses.create(**FRANCE, max_output_tokens=7, stream=True)
        assert last.type in ("response.completed", "response.incomplete")
        response = last.response  # type: ignore[union-attr]
    else:
        response = client.responses.create(**FRANCE, max_output_tokens=7)
    assert response.usage is not None
    expected = before + response.usage.output_tokens
    stack.cortex.until(lambda: spent() == expected, "it is counted")


def test_refusals_come_through(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**FRANCE, background=True)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "background")
