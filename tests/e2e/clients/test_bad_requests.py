"""Invalid requests get the right status and error code, and the next request succeeds."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from clients.stack import MODEL, Stack, post

HI: Any = [{"role": "user", "content": "Hi"}]
CONTEXT = 8192


@pytest.fixture(autouse=True)
def still_answers(client: openai.OpenAI, stack: Stack) -> Iterator[None]:
    yield
    response = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=1)
    assert response.usage is not None
    assert response.usage.completion_tokens == 1
    stack.until_idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "no/such-model"}, openai.NotFoundError, "model_not_found"),
        ({"model": ""}, openai.BadRequestError, "missing_model_field"),
        ({"model": 7}, openai.BadRequestError, "missing_model_field"),
        ({"messages": "Hi"}, openai.BadRequestError, "invalid_request_body"),
        ({"messages": []}, openai.BadRequestError, "invalid_request_body"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, openai.BadRequestError, "invalid_request_body"),
        ({"messages": [{"role": "user", "content": 7}]}, openai.BadRequestError, "invalid_request_body"),
        ({"temperature": "hot"}, openai.BadRequestError, "invalid_request_body"),
        ({"max_tokens": 0}, openai.BadRequestError, "invalid_request_body"),
        ({"max_tokens": -2}, openai.BadRequestError, "invalid_request_body"),
        ({"max_tokens": 1.5}, openai.BadRequestError, "invalid_request_body"),
        ({"min_tokens": 2}, openai.BadRequestError, "unsupported_parameter"),
        ({"n": 17}, openai.BadRequestError, "invalid_request_body"),
        ({"web_search_options": {"a": 1}}, openai.BadRequestError, "unsupported_parameter"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_chat_request_with_an_invalid_field_is_rejected_with_an_error_code(
    client: openai.OpenAI, fields: dict[str, Any], kind: type[Exception], code: str, stream: bool
):
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, stream=stream, extra_body={"max_tokens": 1} | fields)
    assert type(caught.value) is kind
    assert caught.value.code == code
    assert "\n" not in caught.value.message


def test_error_for_a_too_long_prompt_names_the_prompt_length_and_the_context_length(client: openai.OpenAI):
    # The node counts the tokens of the first prompt; it rejects the second by its length in characters.
    for text, length in (("a " * CONTEXT, "prompt_len"), ("word " * 26 * CONTEXT, "estimated_prompt_tokens")):
        messages: Any = [{"role": "user", "content": text}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in caught.value.message
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["max"] == CONTEXT
        assert caught.value.body[length] > CONTEXT


def test_image_is_rejected_by_a_text_model(client: openai.OpenAI):
    content = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    messages: Any = [{"role": "user", "content": content}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert caught.value.code == "vision_unsupported"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "malformed_json"),
        (b"", 400, "malformed_json"),
        (b'{"model": "\xff"}', 400, "malformed_json"),
        (b"[" * 100_000, 400, "malformed_json"),
        (b"[]", 400, "invalid_request_body"),
        (b"null", 400, "invalid_request_body"),
    ],
    ids=["cut", "empty", "not-utf8", "deep", "list", "null"],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_body_that_is_not_valid_json_is_rejected_with_its_error_code(
    stack: Stack, path: str, body: bytes, status: int, code: str
):
    actual, _, error = post(f"{stack.url}/v1/{path}", body)
    assert (actual, error["error"]["code"], error["error"]["type"]) == (status, code, "invalid_request_error")


def test_completions_reject_overlong_prompts_negative_limits_and_unknown_token_ids(client: openai.OpenAI):
    fields: Any = {"model": MODEL, "prompt": "word " * CONTEXT}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**fields, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="word", max_tokens=-2)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[10**9], max_tokens=1)
