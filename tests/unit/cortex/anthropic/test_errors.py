"""Error responses in the Messages API's format."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.errors import ApiError, context_length_exceeded, overloaded
from helexa.cortex.anthropic.message_and_errors import error_headers, to_anthropic_error
from helexa.cortex.forwarding.translated_reply import streamed_error
from helexa.cortex.upstream.error_responses import read_error


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (402, "billing_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_anthropic_error_type_follows_the_status(status: int, kind: str) -> None:
    assert to_anthropic_error(ApiError(status, "any", "text"), "req_1") == {
        "type": "error",
        "error": {"type": kind, "message": "text"},
        "request_id": "req_1",
    }


def test_headers_tell_anthropic_clients_when_or_whether_to_retry() -> None:
    assert error_headers(overloaded("full", 7)) == {"Retry-After": "7"}
    spent = ApiError(429, "insufficient_quota", "spent", type="insufficient_quota")
    assert error_headers(spent) == {"x-should-retry": "false"}


def message(error: ApiError) -> str:
    return to_anthropic_error(error)["error"]["message"]


VLLM = "This model's maximum context length is 4096 tokens. However, you requested "


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (context_length_exceeded(5000, 4096), "prompt is too long: 5000 tokens > 4096 maximum"),
        (
            ApiError(400, "context_length_exceeded", "no", estimated_prompt_tokens=70, max=50),
            "prompt is too long: about 70 tokens > 50 maximum",
        ),
        (ApiError(400, "context_length_exceeded", "no"), "prompt is too long"),
        (ApiError(400, "context_length_exceeded", "no", max=50), "prompt is too long: at least 51 tokens > 50 maximum"),
        (
            ApiError(
                400,
                "context_length_exceeded",
                VLLM + "6000 tokens (5000 in the messages, 1000 in the completion). Please reduce the length.",
            ),
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            ApiError(
                400,
                "context_length_exceeded",
                VLLM + "5000 tokens (4000 in the messages, 1000 in the completion). Please reduce the length.",
            ),
            "input length and `max_tokens` exceed context limit: 4000 + 1000 > 4096",
        ),
        (
            ApiError(400, "context_length_exceeded", VLLM + "too much: 4000 in the messages."),
            "input length and `max_tokens` exceed context limit: 4000 + 97 > 4096",
        ),
    ],
)
def test_overlong_prompt_message_has_the_wording_that_agents_parse(error: ApiError, expected: str) -> None:
    assert message(error) == expected


def envelope(**fields: Any) -> bytes:
    return json.dumps({"error": {"message": "m", "type": "api_error", "code": "c", "param": None, **fields}}).encode()


def test_error_of_a_helexa_node_keeps_its_text_and_code() -> None:
    error = read_error(422, envelope(code="template_render_failed"), 5)
    assert (error.status, error.code, str(error), error.retry_after) == (422, "template_render_failed", "m", 5)
    assert str(read_error(500, envelope(code=None))) == "m"
    assert len(str(read_error(500, envelope(message="x" * 5000)))) == 1000
    sizes = envelope(code="context_length_exceeded", prompt_len=9, max=5)
    assert message(read_error(400, sizes)) == "prompt is too long: 9 tokens > 5 maximum"


def test_error_message_of_other_servers_about_a_long_prompt_is_recognized() -> None:
    body = {"error": {"message": VLLM + "5000 tokens (4999 in the messages, 1 in the completion).", "code": 400}}
    assert message(read_error(400, json.dumps(body).encode())) == "prompt is too long: 4999 tokens > 4096 maximum"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from(["message", "type", "code", "param", "max", "error"]), children, max_size=5)
    ),
    max_leaves=8,
)


@given(st.integers(100, 999), st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()), JSON)
def test_any_error_body_of_a_node_becomes_an_api_error(status: int, body: bytes, value: Any) -> None:
    for error in (read_error(status, body), streamed_error(value)):
        assert 400 <= error.status < 600
        assert isinstance(message(error), str)
