"""Anthropic's official client with a real model behind the gateway."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from clients.stack import MODEL, TIMEOUT_SECONDS, Stack, read

FRANCE: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client without retries, so that tests see every failure."""
    http = anthropic.DefaultHttpxClient(trust_env=False)
    options: dict[str, Any] = {"api_key": "any", "max_retries": 0, "timeout": TIMEOUT_SECONDS}
    with anthropic.Anthropic(base_url=stack.url, http_client=http, **options) as client:
        yield client


def arguments(**fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": FRANCE, "max_tokens": 24, "extra_body": {"temperature": 0}} | fields


def prompt_tokens(usage: Any) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_streamed_message_equals_the_complete_message(claude: anthropic.Anthropic):
    message = claude.messages.create(**arguments())
    (block,) = message.content
    assert block.type == "text" and "Paris" in block.text
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "small")
    with claude.messages.stream(**arguments()) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert pieces
    assert "".join(pieces) == block.text
    assert streamed.stop_reason == message.stop_reason
    assert streamed.usage.output_tokens == message.usage.output_tokens > 0
    assert prompt_tokens(streamed.usage) == prompt_tokens(message.usage) > 0


def test_max_tokens_and_stop_sequences_end_a_message_with_their_stop_reason(claude: anthropic.Anthropic):
    cut = claude.messages.create(**arguments(max_tokens=2))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    stopped = claude.messages.create(**arguments(stop_sequences=["Paris"]))
    assert "Paris" not in "".join(block.text for block in stopped.content if block.type == "text")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    with claude.messages.stream(**arguments(stop_sequences=["never said", "Paris"])) as stream:
        assert stream.get_final_message().stop_sequence == "Paris"


def test_final_assistant_message_of_the_request_is_continued(claude: anthropic.Anthropic):
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    message = claude.messages.create(**arguments(messages=begun))
    assert message.content[0].type == "text" and message.content[0].text.startswith(" Paris")


def test_count_tokens_equals_the_prompt_tokens_in_the_usage(claude: anthropic.Anthropic):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    for fields in ({}, {"system": system}, {"messages": [*FRANCE, {"role": "assistant", "content": "It is"}]}):
        request = arguments(**fields)
        count = claude.messages.count_tokens(
            **{name: request[name] for name in request.keys() - {"max_tokens", "extra_body"}}
        )
        assert count.input_tokens == prompt_tokens(claude.messages.create(**request).usage)


def test_overlong_prompt_image_and_unknown_model_get_errors_in_anthropic_format(claude: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: [0-9]+ tokens > [0-9]+ maximum"):
        claude.messages.create(**arguments(messages=[{"role": "user", "content": "word " * 40_000}]))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    with pytest.raises(anthropic.BadRequestError, match="text only") as refused:
        claude.messages.create(**arguments(messages=[{"role": "user", "content": [image]}]))
    body: Any = refused.value.body
    assert body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**arguments(model="nobody"))


def test_tokens_of_messages_are_counted_in_the_gateway_metrics(stack: Stack, claude: anthropic.Anthropic):
    name = f'cortex_completion_tokens_total{{model="{MODEL}",node="n1"}}'

    def measured_tokens() -> float:
        return next(
            (float(line.split()[-1]) for line in read(stack.metrics_url).splitlines() if line.startswith(name)), 0
        )

    previous_total = measured_tokens()
    claude.messages.create(**arguments(max_tokens=3))
    stack.cortex.until(lambda: measured_tokens() == previous_total + 3, "the message is counted")
    with claude.messages.stream(**arguments(max_tokens=3)) as stream:
        stream.until_done()
    stack.cortex.until(lambda: measured_tokens() == previous_total + 6, "the stream is counted")
