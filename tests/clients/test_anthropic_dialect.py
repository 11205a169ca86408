"""Anthropic's own client, through the gateway, to a real model."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from clients.stack import MODEL, PATIENCE_SECONDS, Stack, read

FRANCE: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    """The official client, which must see every failure and so never retries."""
    http = anthropic.DefaultHttpxClient(trust_env=False)
    options: dict[str, Any] = {"api_key": "any", "max_retries": 0, "timeout": PATIENCE_SECONDS}
    with anthropic.Anthropic(base_url=stack.url, http_client=http, **options) as client:
        yield client


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": FRANCE, "max_tokens": 24, "extra_body": {"temperature": 0}} | fields


def prompt_tokens(usage: Any) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_the_model_answers_and_a_stream_says_the_same(claude: anthropic.Anthropic):
    message = claude.messages.create(**ask())
    (block,) = message.content
    assert block.type == "text" and "Paris" in block.text
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "small")
    with claude.messages.stream(**ask()) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert len(pieces) > 2
    assert "".join(pieces) == block.text
    assert streamed.stop_reason == message.stop_reason
    assert streamed.usage.output_tokens == message.usage.output_tokens > 0
    assert prompt_tokens(streamed.usage) == prompt_tokens(message.usage) > 0


def test_limits_and_stop_sequences_end_an_answer(claude: anthropic.Anthropic):
    cut = claude.messages.create(**ask(max_tokens=2))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    stopped = claude.messages.create(**ask(stop_sequences=["Paris"]))
    assert "Paris" not in "".join(block.text for block in stopped.content if block.type == "text")
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    with claude.messages.stream(**ask(stop_sequences=["never said", "Paris"])) as stream:
        assert stream.get_final_message().stop_sequence == "Paris"


def test_an_answer_that_is_begun_is_continued(claude: anthropic.Anthropic):
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    message = claude.messages.create(**ask(messages=begun))
    assert message.content[0].type == "text" and message.content[0].text.startswith(" Paris")


def test_tokens_are_counted_as_they_are_charged(claude: anthropic.Anthropic):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    for fields in ({}, {"system": system}, {"messages": [*FRANCE, {"role": "assistant", "content": "It is"}]}):
        asked = ask(**fields)
        count = claude.messages.count_tokens(
            **{name: asked[name] for name in asked.keys() - {"max_tokens", "extra_body"}}
        )
        assert count.input_tokens == prompt_tokens(claude.messages.create(**asked).usage)


def test_what_the_model_cannot_do_is_refused_in_anthropics_shape(claude: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: [0-9]+ tokens > [0-9]+ maximum"):
        claude.messages.create(**ask(messages=[{"role": "user", "content": "word " * 40_000}]))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    with pytest.raises(anthropic.BadRequestError, match="text only") as refused:
        claude.messages.create(**ask(messages=[{"role": "user", "content": [image]}]))
    body: Any = refused.value.body
    assert body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**ask(model="nobody"))


def test_the_tokens_of_messages_are_measured(stack: Stack, claude: anthropic.Anthropic):
    name = f'cortex_completion_tokens_total{{model="{MODEL}",node="n1"}}'

    def counted() -> float:
        return next(
            (float(line.split()[-1]) for line in read(stack.metrics_url).splitlines() if line.startswith(name)), 0
        )

    before = counted()
    claude.messages.create(**ask(max_tokens=3))
    stack.cortex.until(lambda: counted() == before + 3, "the message is counted")
    with claude.messages.stream(**ask(max_tokens=3)) as stream:
        stream.until_done()
    stack.cortex.until(lambda: counted() == before + 6, "the stream is counted")
