"""What is said of a prompt before a node has seen it."""

import json
from typing import Any

import pytest

from helexa.core.errors import ApiError
from helexa.cortex.prompt_check import advice, check_prompt, estimated_tokens


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"messages": [{"role": "user", "content": "x" * 400}]}, 102),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "é" * 4}, {"type": "image_url"}]}]}, 4),
        ({"messages": [{"role": "assistant", "content": None}] * 2}, 4),
        ({"messages": []}, 1),
        ({"messages": ["odd", {"content": 5}]}, 4),
        ({"prompt": "y" * 40}, 10),
        ({"prompt": [5] * 30}, 30),
        ({"prompt": [[5] * 30]}, 30),
        ({"prompt": None, "input": "z" * 16}, 6),
        ({"input": "z" * 16, "instructions": "i" * 40}, 18),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "z" * 40}]}]}, 12),
        ({"input": [{"type": "function_call_output", "output": "z" * 40}, "odd"], "instructions": None}, 14),
        ({"input": ["a" * 40, "b" * 80, "c" * 60]}, 20),
        ({"input": [[5] * 30, [6] * 40]}, 40),
        ({"input": [5] * 30}, 30),
        ({"input": []}, 1),
        ({"images": "z" * 16}, 7),
    ],
)
def test_estimates(fields: dict[str, Any], tokens: int) -> None:
    assert estimated_tokens(body(**fields)) == tokens


def test_what_cannot_fit_is_refused_and_what_may_is_not() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}}
    check_prompt(body(messages=[{"role": "user", "content": [image]}]), 100)  # bytes of an image are no text
    check_prompt(body(input=[{"role": "user", "content": [image | {"type": "input_image"}]}]), 100)
    check_prompt(body(messages=[{"role": "user", "content": "x" * 360}]), 100)
    check_prompt(body(input=["some words " * 30] * 500), 100)  # each text is a prompt of its own
    check_prompt(body(input="x", tools=["x" * 10_000]), 100)  # as for messages
    with pytest.raises(ApiError, match="maximum context length is 100 tokens") as caught:
        check_prompt(body(messages=[{"role": "user", "content": "x" * 900}]), 100)
    for prompt in ("x" * 900, ["x", "x" * 900], [{"content": "x" * 900}], [7] * 999):
        with pytest.raises(ApiError, match="maximum context length is 100 tokens"):
            check_prompt(body(input=prompt), 100)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.extras == {"max": 100, "estimated_prompt_tokens": 227}


@pytest.mark.parametrize(
    ("agent", "hint"),
    [(b"LiteLLM/1.0", b"retry"), (b"Agent Zero", b"limits"), (b"Zed/0.2", b"max_model_len"), (b"curl/8", None)],
)
def test_advice_for_known_clients(agent: bytes, hint: bytes | None) -> None:
    said = advice([(b"user-agent", agent)])
    assert said is None if hint is None else hint in (said or b"")
    assert advice([]) is None


def test_what_only_others_can_read_counts_as_a_whole() -> None:
    text = b'{"model":"a","messages":[],"x":1e999}'
    assert estimated_tokens(text) == len(text) // 4
