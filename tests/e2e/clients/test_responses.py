"""OpenAI's Responses API with a real model behind the gateway."""

from typing import Any

import openai
import pytest

from clients.stack import MODEL, Stack, read

FRANCE: Any = {"model": "small", "input": "What is the capital of France? Answer in one word.", "temperature": 0}


def test_streamed_response_equals_the_complete_response(client: openai.OpenAI) -> None:
    complete = client.responses.create(**FRANCE, max_output_tokens=24)
    assert "Paris" in complete.output_text
    assert (complete.model, complete.status) == (MODEL, "completed")
    with client.responses.stream(**FRANCE, max_output_tokens=24) as stream:
        streamed_text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert streamed_text == final.output_text == complete.output_text
    assert final.usage is not None and complete.usage is not None
    assert (final.usage.input_tokens, final.usage.output_tokens) == (
        complete.usage.input_tokens,
        complete.usage.output_tokens,
    )


def test_previous_response_id_continues_the_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(**FRANCE, max_output_tokens=24)
    request = {**FRANCE, "input": "Which country is that in?", "max_output_tokens": 16}
    assistant_message = {"role": "assistant", "content": first.output_text}
    turns: Any = [
        {"role": "user", "content": FRANCE["input"]},
        assistant_message,
        {"role": "user", "content": request["input"]},
    ]
    continued = client.responses.create(**request, previous_response_id=first.id)
    spelled = client.responses.create(**request | {"input": turns})
    assert continued.output_text == spelled.output_text
    assert continued.usage is not None and spelled.usage is not None
    assert continued.usage.input_tokens == spelled.usage.input_tokens


def test_stored_response_can_be_read_until_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(**FRANCE, max_output_tokens=5)
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(first.id)


def test_logprobs_match_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    response = client.responses.create(
        **FRANCE, max_output_tokens=8, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    (message,) = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs or []
    assert b"".join(bytes(token.bytes) for token in logprobs).decode() == response.output_text
    for token in logprobs:
        likeliest, second = token.top_logprobs
        assert token.logprob == likeliest.logprob >= second.logprob  # at temperature 0


def test_response_cut_off_at_max_output_tokens_has_the_status_incomplete(client: openai.OpenAI) -> None:
    cut = client.responses.create(**FRANCE | {"input": "Tell me a long story."}, max_output_tokens=5)
    assert cut.usage is not None
    assert (cut.status, cut.usage.output_tokens) == ("incomplete", 5)
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [True, False])
def test_output_tokens_of_responses_are_counted_in_the_gateway_metrics(
    stack: Stack, client: openai.OpenAI, stream: bool
) -> None:
    def spent() -> float:
        lines = read(stack.metrics_url).splitlines()
        name = "cortex_completion_tokens_total"
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    earlier = spent()
    if stream:
        *_, last = client.responses.create(**FRANCE, max_output_tokens=7, stream=True)
        assert last.type in ("response.completed", "response.incomplete")
        response = last.response  # type: ignore[union-attr]
    else:
        response = client.responses.create(**FRANCE, max_output_tokens=7)
    assert response.usage is not None
    expected = earlier + response.usage.output_tokens
    stack.cortex.until(lambda: spent() == expected, "it is counted")


def test_error_of_the_node_reaches_the_client_of_the_gateway(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**FRANCE, background=True)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "background")
