"""Prompt size checks before a request is sent to a node."""

import json
from typing import Any

import pytest

from helexa.core.errors import ApiError
from helexa.cortex.forwarding.headers import advice
from helexa.cortex.forwarding.token_bounds import MAX_BYTES_PER_TOKEN, check_prompt, prompt_bytes


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 408),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "é" * 4}, {"type": "image_url"}]}]}, 16),
        ({"messages": [{"role": "assistant", "content": None}] * 2}, 16),
        ({"messages": []}, 0),
        ({"messages": ["odd", {"content": 5}]}, 16),
        ({"prompt": "y" * 40}, 40),
        ({"prompt": [5] * 30}, 0),
        ({"prompt": None, "input": "z" * 16}, 24),
        ({"input": "z" * 16, "instructions": "i" * 40}, 72),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "z" * 40}]}]}, 48),
        ({"input": [{"type": "function_call_output", "output": "z" * 40}, "odd"], "instructions": None}, 56),
        ({"input": ["a" * 40, "b" * 80, "c" * 60]}, 80),
        ({"input": []}, 0),
        ({"images": "z" * 16}, 0),
    ],
)
def test_prompt_size_is_the_number_of_bytes_of_all_texts(fields: dict[str, Any], size: int) -> None:
    assert prompt_bytes(body(**fields)) == size


LONGEST = MAX_BYTES_PER_TOKEN * 100


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": " " * (LONGEST - 8)}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "A" * 2 * LONGEST}}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "A" * 2 * LONGEST}]}]},
        {"input": ["some words " * 30] * 500},  # each text is a separate prompt
        {"input": "x", "tools": ["x" * 2 * LONGEST]},
        {"prompt": [7] * LONGEST},  # the node counts token ids exactly
    ],
    ids=str.split("spaces image input_image texts tools ids"),
)
def test_prompt_that_could_fit_the_context_is_forwarded(fields: dict[str, Any]) -> None:
    check_prompt(body(**fields), 100)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x" * LONGEST}]},
        {"prompt": "x" * (LONGEST + 8)},
        {"input": "x" * LONGEST},
        {"input": ["x", "x" * (LONGEST + 8)]},
        {"input": [{"content": "x" * LONGEST}]},
    ],
    ids=str.split("messages prompt input texts items"),
)
def test_prompt_too_long_for_any_tokenizer_is_rejected(fields: dict[str, Any]) -> None:
    estimate = (LONGEST + 8) // 4
    with pytest.raises(
        ApiError, match=f"maximum context length is 100 tokens.*an estimated {estimate} tokens"
    ) as caught:
        check_prompt(body(**fields), 100)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.extras == {"max": 100, "estimated_prompt_tokens": estimate}


@pytest.mark.parametrize(
    ("agent", "hint"),
    [(b"LiteLLM/1.0", b"retry"), (b"Agent Zero", b"limits"), (b"Zed/0.2", b"max_model_len"), (b"curl/8", None)],
)
def test_overlong_prompt_error_has_advice_for_known_user_agents(agent: bytes, hint: bytes | None) -> None:
    hint_text = advice([(b"user-agent", agent)])
    assert hint_text is None if hint is None else hint in (hint_text or b"")
    assert advice([]) is None


def test_body_with_out_of_range_json_numbers_is_not_rejected_by_the_prompt_check() -> None:
    check_prompt(b'{"messages":[{"content":"%b"}],"x":1e999}' % (b"x" * 2 * LONGEST), 100)
