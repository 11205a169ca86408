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
        ({"input": "z" * 16}, 7),
    ],
)
def test_estimates(fields: dict[str, Any], tokens: int) -> None:
    assert estimated_tokens(body(**fields)) == tokens


def test_what_cannot_fit_is_refused_and_what_may_is_not() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}}
    check_prompt(body(messages=[{"role": "user", "content": [image]}]), 100)  # bytes of an image are no text
    check_prompt(body(messages=[{"role": "user", "content": "x" * 360}]), 100)
    with pytest.raises(ApiError, match="maximum context length is 100 tokens") as caught:
        check_prompt(body(messages=[{"role": "user", "content": "x" * 900}]), 100)
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
