"""Error responses of third-party backends: their text, their meaning, and whose fault they are."""

import json
import logging
from typing import Any

import pytest
from aiohttp import web

from cortex.fake_node import FakeNode, Speak
from cortex.running_gateway import Cortex
from helexa.cortex.anthropic.message_and_errors import to_anthropic_error
from helexa.cortex.upstream.error_responses import has_openai_format, read_error, says_model_is_gone

OPENAI = {"message": "no such voice", "type": "invalid_request_error", "code": "voice_not_found", "param": "voice"}


def read(body: Any, status: int = 400) -> tuple[int, str | None, str]:
    error = read_error(status, body if isinstance(body, bytes) else json.dumps(body).encode())
    return error.status, error.code, str(error)


@pytest.mark.parametrize(
    "body",
    [
        {"error": "no such voice"},
        {"error": {"message": "no such voice", "type": "BadRequestError", "param": None, "code": 400}},
        {"object": "error", "message": "no such voice", "type": "BadRequestError", "param": None, "code": 400},
        {"object": "error", "message": {"detail": "no such voice"}, "type": "invalid_request_error", "code": "3051"},
        {"detail": "no such voice"},
        {"detail": {"error": "no such voice"}},
        {"detail": {"msg": "no such voice", "type": "bad_input"}},
        {"type": "about:blank", "title": "Bad Request", "status": 400, "detail": "no such voice"},
        {"type": "error", "error": {"type": "invalid_request_error", "message": "no such voice"}},
        {"errors": [{"code": 7003, "message": "no such voice"}]},
        {"base_resp": {"status_code": 1004}, "message": "no such\nvoice"},
        [{"error": {"code": 400, "message": "no such voice", "status": "INVALID_ARGUMENT"}}],
    ],
    ids=json.dumps,
)
def test_message_of_a_backend_error_is_kept_in_each_known_error_format(body: Any) -> None:
    assert read(body) == (400, None, "no such voice")


def test_backend_error_about_invalid_fields_keeps_their_paths() -> None:
    detail = [
        {"loc": ["body", "messages", 0, "role"], "msg": "field required", "type": "missing"},
        {"loc": ["body", "model"], "msg": "field required", "type": "missing"},
    ]
    assert read({"detail": detail}, 422)[2] == "body.messages.0.role: field required; body.model: field required"


@pytest.mark.parametrize("body", [b"", b"at /srv/x.py:7", b"[]", b'"x"', b"{}", b'{"error": {}}', b"[" * 9999])
def test_backend_error_body_without_a_message_is_replaced_by_its_status(body: bytes) -> None:
    for status in (400, 503):
        assert read(body, status) == (status, "upstream_error", f"upstream returned {status}")
    assert read_error(302, body).status == 502
    assert read_error(503, body, 7).retry_after == 7


LLAMACPP = {
    "error": {
        "code": 400,
        "message": "the request exceeds the available context size, try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 5000,
        "n_ctx": 4096,
    }
}
VLLM = (
    "You passed 5000 input tokens and requested 100 output tokens. However, the model's context length is only 4096"
    " tokens, resulting in a maximum input length of 3996 tokens. Please reduce the length of the input prompt."
)
VLLM_PROMPT = "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure that ..."
SGLANG = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."
LLAMA_CPP_PYTHON = (
    "This model's maximum context length is 4096 tokens, however you requested 5500 tokens (5000 in your prompt; 500"
    " for the completion). Please reduce your prompt; or completion length."
)
LM_STUDIO = (
    "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with context length"
    " of only 4096 tokens, which is not enough."
)
LM_STUDIO_KEEP = (
    "The number of tokens to keep from the initial prompt is greater than the context length (n_keep: 5000>= n_ctx:"
    " 4096). Try to load the model with a larger context length, or provide a shorter input."
)
MISTRAL = "Prompt contains 5000 tokens and 0 draft tokens, too large for model with 4096 maximum context length"
GEMINI = "The input token count (5000) exceeds the maximum number of tokens allowed (4096)."
TGI = (
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens and 1"
    " `max_new_tokens`"
)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, LLAMACPP),
        (400, {"object": "error", "message": VLLM, "type": "BadRequestError", "param": None, "code": 400}),
        (400, {"error": {"message": VLLM_PROMPT, "type": "BadRequestError", "param": None, "code": 400}}),
        (400, {"object": "error", "message": SGLANG, "type": "BadRequestError", "param": None, "code": 400}),
        (400, {"error": {"message": LLAMA_CPP_PYTHON, "type": "invalid_request_error", "param": "messages"}}),
        (500, {"error": {"message": "Requested tokens (5000) exceed context window of 4096", "code": None}}),
        (400, {"error": LM_STUDIO}),
        (400, {"error": LM_STUDIO_KEEP}),
        (400, {"object": "error", "message": MISTRAL, "type": "invalid_request_error", "code": "3051"}),
        (400, [{"error": {"code": 400, "message": GEMINI, "status": "INVALID_ARGUMENT"}}]),
        (422, {"error": TGI, "error_type": "validation"}),
        (400, {"type": "error", "error": {"type": "x", "message": "prompt is too long: 5000 tokens > 4096 maximum"}}),
    ],
)
def test_context_length_errors_of_all_servers_get_the_code_context_length_exceeded(status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    error = read_error(status, data)
    assert (error.status, error.code, error.extras) == (
        400,
        "context_length_exceeded",
        {"prompt_len": 5000, "max": 4096},
    )
    assert not has_openai_format(data, error)
    message = to_anthropic_error(error)["error"]["message"]
    assert message == "prompt is too long: 5000 tokens > 4096 maximum"


@pytest.mark.parametrize(
    "text",
    [
        "context_length must be an integer",
        "the tool 'read' has too many parameters",
        "max_tokens must be at least 1",
        "the field 'context window' is unknown",
        "only text is supported in this context",
    ],
)
def test_other_backend_errors_do_not_get_the_code_context_length_exceeded(text: str) -> None:
    assert read({"error": text}) == (400, None, text)
    assert read({"error": "the context window exceeded our patience"}, 500)[1] is None


def answering(status: int, body: Any, **headers: str) -> Speak:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return speak


async def test_backend_error_in_another_format_reaches_the_client_in_openai_format(
    cortex: Cortex, node: FakeNode
) -> None:
    node.speak = answering(422, {"detail": "no such voice"})
    status, body = await cortex.ask()
    assert (status, body["error"]) == (
        422,
        {"message": "no such voice", "type": "invalid_request_error", "code": None, "param": None},
    )
    node.speak = answering(400, LLAMACPP)
    for path in ("/v1/chat/completions", "/v1/responses"):
        async with cortex.client.post(cortex.url + path, json={"model": "Org/M", "input": "Hi"}) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"], error["message"]) == (
            400,
            "context_length_exceeded",
            "the request exceeds the available context size, try increasing it",
        )


async def test_backend_error_in_openai_format_is_forwarded_unchanged(cortex: Cortex, node: FakeNode) -> None:
    node.speak = answering(400, {"error": OPENAI | {"voices": ["a"]}})
    assert await cortex.ask() == (400, {"error": OPENAI | {"voices": ["a"]}})


async def test_backend_error_about_a_long_prompt_gets_the_wording_that_claude_code_parses(
    cortex: Cortex, node: FakeNode
) -> None:
    node.speak = answering(400, LLAMACPP)
    body = {"model": "Org/M", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    async with cortex.client.post(f"{cortex.url}/v1/messages", json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["message"]) == (400, "prompt is too long: 5000 tokens > 4096 maximum")


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (401, {"message": "Incorrect API key: sk-secret", "type": "authentication_error"}, "upstream_auth_error"),
        (403, {"message": "no access for sk-secret", "type": "permission_error"}, "upstream_auth_error"),
        (402, {"message": "Insufficient Balance sk-secret", "type": "unknown_error"}, "upstream_quota_exceeded"),
        (429, {"message": "sk-secret is used up", "code": "insufficient_quota"}, "upstream_quota_exceeded"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
async def test_backend_that_rejects_the_gateways_key_is_not_reported_as_a_client_error(
    cortex: Cortex,
    node: FakeNode,
    caplog: pytest.LogCaptureFixture,
    path: str,
    status: int,
    error: dict[str, str],
    code: str,
) -> None:
    node.speak = answering(status, {"error": error})
    body = {"model": "Org/M", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    with caplog.at_level(logging.INFO):
        async with cortex.client.post(cortex.url + path, json=body) as response:
            answer = (await response.json())["error"]
    assert response.status == 502
    assert "node 'n1'" in answer["message"] and "secret" not in answer["message"]
    if path != "/v1/messages":
        assert answer["code"] == code
    if path != "/tokenize":
        assert f"node rejected the request node=n1 status={status}" in caplog.text


@pytest.mark.parametrize(
    ("status", "text", "gone"),
    [
        (404, "The model `x` does not exist.", True),
        (404, 'model "x" not found, try pulling it first', True),
        (404, "no such model", True),
        (400, "Invalid model name passed in model=x", True),
        (400, "model 'x' not found in the list of voices", False),
        (404, "404 page not found", False),
        (404, "This is not a chat model and thus not supported in the v1/chat/completions endpoint", False),
        (404, "response 'resp_1' not found", False),
        (500, "the model was not found", False),
    ],
)
def test_backend_errors_about_a_missing_model_are_recognized(status: int, text: str, gone: bool) -> None:
    assert says_model_is_gone(read_error(status, json.dumps({"error": text}).encode())) is gone
