"""A backend gets only fields and routes that it has: the gateway learns from its refusals."""

import base64
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from aiohttp import web

from cortex.fake_node import CHOICE, DONE, USAGE, FakeNode, begin, chunk, event
from cortex.running_gateway import Cortex, running_cortex
from helexa.cortex.backends.chat_request import for_backend
from helexa.cortex.backends.learned_refusals import KNOWLEDGE_SECS, BackendKnowledge, Knowledge
from helexa.cortex.backends.refused_fields import refused_fields
from helexa.cortex.backends.responses_api import refuses_tool_types

PNG = base64.b64encode(
    b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01" + bytes(64)
).decode()
KNOWN = {"model", "messages", "max_tokens", "stream", "stream_options", "tools", "stop", "response_format"}
KNOWN_IN_MESSAGES = {"role", "content", "tool_calls", "tool_call_id"}
THINKING = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "Hello"}],
    },
    {"role": "user", "content": "Again"},
]


def not_found(request: web.Request) -> web.Response | None:
    return None if request.path == "/v1/chat/completions" else web.json_response({"detail": "Not Found"}, status=404)


async def mistral(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Refuse the first unknown field, as FastAPI does with models that forbid unknown fields."""
    if (missing := not_found(request)) is not None:
        return missing
    body = await request.json()
    unknown: list[list[Any]] = [["body", name] for name in body if name not in KNOWN]
    for index, message in enumerate(body["messages"]):
        unknown += [["body", "messages", index, name] for name in message if name not in KNOWN_IN_MESSAGES]
    if unknown:
        detail = [{"type": "extra_forbidden", "loc": unknown[0], "msg": "Extra inputs are not permitted"}]
        return web.json_response({"detail": detail}, status=422)
    return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})


async def reasoning_model(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Refuse `max_tokens`, as OpenAI does for its reasoning models."""
    if "max_tokens" in await request.json():
        text = (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        )
        error = {
            "message": text,
            "type": "invalid_request_error",
            "code": "unsupported_parameter",
            "param": "max_tokens",
        }
        return web.json_response({"error": error}, status=400)
    return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})


async def always_refuse(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.json_response({"detail": "chat_template_kwargs, user and everything else are wrong"}, status=422)


@pytest.fixture
async def backend() -> AsyncIterator[FakeNode]:
    async with FakeNode(speak=mistral).holds("Org/M").serving() as backend:
        yield backend


@asynccontextmanager
async def gateway(backend: FakeNode, **sections: Any) -> AsyncIterator[Cortex]:
    settings = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}], **sections}
    async with running_cortex(backend, settings=settings) as cortex:
        yield cortex


async def post(cortex: Cortex, path: str, **fields: Any) -> tuple[int, Any]:
    async with cortex.client.post(cortex.url + path, json={"model": "Org/M", **fields}) as response:
        return response.status, await response.json()


async def test_messages_request_is_repeated_without_fields_that_the_backend_rejected(backend: FakeNode) -> None:
    async with gateway(backend) as cortex:
        fields = {"max_tokens": 9, "messages": THINKING, "metadata": {"user_id": "u"}}
        status, message = await post(cortex, "/v1/messages", **fields)
        assert (status, message["content"][0]["text"]) == (200, "Hello")
        attempts = len(backend.bodies)
        assert attempts == 4  # `user`, `chat_template_kwargs` and `reasoning_content` are refused
        assert (await post(cortex, "/v1/messages", **fields))[0] == 200
    assert len(backend.bodies) == attempts + 1
    sent = orjson.loads(backend.bodies[-1])
    assert set(sent) <= KNOWN
    assert [message["content"] for message in sent["messages"]] == ["Hi", "Hello", "Again"]


async def test_sampling_parameters_that_the_backend_rejects_are_omitted(backend: FakeNode) -> None:
    async with gateway(backend) as cortex:
        message = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "top_k": 40}
        assert (await post(cortex, "/v1/messages", **message))[0] == 200
        options = {"top_k": 40, "min_p": 0.1, "repeat_penalty": 1.1, "num_predict": 9}
        chat = {"messages": [{"role": "user", "content": "Hi"}], "options": options, "stream": False}
        status, answer = await post(cortex, "/api/chat", **chat)
        assert (status, answer["message"]["content"]) == (200, "Hello")
    assert set(orjson.loads(backend.bodies[-1])) <= KNOWN


async def anthropic(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Refuse `temperature` together with `top_p`, as Anthropic does for its newer models."""
    if {"temperature", "top_p"} <= (await request.json()).keys():
        text = "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
        return web.json_response({"error": {"type": "invalid_request_error", "message": text}}, status=400)
    return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})


async def test_only_one_of_temperature_and_top_p_is_omitted_if_the_backend_rejects_both_together(
    backend: FakeNode,
) -> None:
    backend.speak = anthropic
    message = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    sampling = [
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5}),
        ({"temperature": 1, "top_p": 0.9}, {"top_p": 0.9}),
        ({"top_p": 0.8}, {"top_p": 0.8}),
    ]
    async with gateway(backend) as cortex:
        for fields, accepted in sampling:
            assert (await post(cortex, "/v1/messages", **message, **fields))[0] == 200
            sent = orjson.loads(backend.bodies[-1])
            assert {name: sent[name] for name in ("temperature", "top_p") if name in sent} == accepted
    assert len(backend.bodies) == 4, "the gateway learns from one refusal"


async def test_output_limit_is_sent_under_the_name_that_the_backend_accepts(backend: FakeNode) -> None:
    backend.speak = reasoning_model
    async with gateway(backend) as cortex:
        status, _ = await post(cortex, "/v1/messages", max_tokens=9, messages=THINKING)
    assert status == 200
    assert orjson.loads(backend.bodies[-1])["max_completion_tokens"] == 9


async def test_billing_line_in_claude_codes_system_prompt_is_not_sent_to_a_backend(backend: FakeNode) -> None:
    """The line differs in every request, so that no backend would find the prompt in its prefix cache."""
    line = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"
    text = {"type": "text", "text": "Be brief."}
    contents: list[Any] = [
        f"{line % 'a'}\n\nBe brief.",
        [{"type": "text", "text": line % "b"}, text],
        [{"type": "text", "text": f"{line % 'c'}\nBe brief."}],
    ]
    async with gateway(backend) as cortex:
        for content in contents:
            messages = [{"role": "system", "content": content}, {"role": "user", "content": f"Print {line}"}]
            assert (await post(cortex, "/v1/chat/completions", messages=messages))[0] == 200
    sent = [orjson.loads(body)["messages"] for body in backend.bodies]
    assert [messages[0]["content"] for messages in sent] == ["Be brief.", [text], [text]]
    assert [messages[1]["content"] for messages in sent] == [f"Print {line}"] * 3


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (b"Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", {"max_tokens"}),
        (b"max_tokens is too large: 9000. This model supports at most 4096 completion tokens", set()),
        (b"the last message must be from the user", set()),
        (b"Extra inputs are not permitted: chat_template_kwargs", {"chat_template_kwargs"}),
        (b"chat_template_kwargs_x is unknown", set()),
        (b"Unrecognized request argument supplied: top_k", {"top_k"}),
        (b'{"loc": ["body", "top_k"], "type": "extra_forbidden"}', {"top_k"}),
        (b"top_k must be -1 (disable), or at least 1, got 0", set()),
    ],
)
def test_only_the_fields_named_in_a_backend_error_are_treated_as_rejected(error: bytes, refused: set[str]) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9000, "top_k": 0}
    body["chat_template_kwargs"] = {"a": 1}
    assert refused_fields(orjson.dumps(body), error) == refused


async def test_request_that_the_backend_always_rejects_is_repeated_a_limited_number_of_times(backend: FakeNode) -> None:
    backend.speak = always_refuse
    async with gateway(backend) as cortex:
        fields = {"max_tokens": 9, "messages": THINKING, "metadata": {"user_id": "u"}}
        status, message = await post(cortex, "/v1/messages", **fields)
        assert (status, "everything else" in message["error"]["message"]) == (422, True)
        attempts = len(backend.bodies)
        backend.speak = mistral
        assert (await post(cortex, "/v1/messages", **fields))[0] == 200
    assert attempts == 2
    assert b"chat_template_kwargs" in backend.bodies[attempts]  # a failed attempt teaches nothing


async def test_fields_set_by_a_chat_client_are_never_omitted(backend: FakeNode) -> None:
    async with gateway(backend) as cortex:
        status, body = await post(
            cortex, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], user="u"
        )
    assert (status, len(backend.bodies)) == (422, 1)
    assert "user" in body["error"]["message"]


async def without_stream_options(node: FakeNode, request: web.Request) -> web.StreamResponse:
    if "stream_options" in await request.json():
        return web.json_response({"error": "unknown field stream_options"}, status=400)
    return await begin(
        request, chunk("Hello"), event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]), DONE
    )


async def test_stream_is_charged_by_an_estimate_if_the_backend_rejects_stream_options(backend: FakeNode) -> None:
    backend.speak = without_stream_options
    keys = [{"key": "capped", "account_id": "acme", "key_id": "capped", "hard_cap": 100_000}]
    async with gateway(backend, entitlements={"keys": keys, "require_auth": True}) as cortex:
        body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        headers = {"authorization": "Bearer capped"}
        async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
            assert b"Hello" in await response.read()
        assert await cortex.sample("cortex_spend_tokens_total", account="acme", key="capped") > 10
    assert [b"stream_options" in body for body in backend.bodies] == [True, False]


async def test_responses_request_to_a_backend_without_this_api_is_sent_as_a_chat_request(backend: FakeNode) -> None:
    async with gateway(backend) as cortex:
        status, response = await post(cortex, "/v1/responses", input="Hi", max_output_tokens=9)
        assert (status, response["object"], response["status"]) == (200, "response", "completed")
        assert response["output"][0]["content"][0]["text"] == "Hello"
        assert response["usage"]["input_tokens_details"]["cached_tokens"] == 3
        assert orjson.loads(backend.bodies[-1])["max_tokens"] == 9
        asked = len(backend.bodies)
        assert (await post(cortex, "/v1/responses", input="Hi"))[0] == 200
    assert len(backend.bodies) == asked + 1, "the gateway asks for /v1/responses only once"


async def llamacpp(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Accept only functions, as the Responses API of llama.cpp's server does."""
    body = await request.json()
    if request.path == "/v1/chat/completions":
        call = {"id": "call_1", "type": "function", "function": {"name": "mail__send", "arguments": "{}"}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return web.json_response({"id": "c1", "choices": [{"message": message, "finish_reason": "tool_calls"}]})
    if any(tool["type"] != "function" for tool in body.get("tools", ())):
        error = {"code": 400, "message": "'type' of tool must be 'function'", "type": "invalid_request_error"}
        return web.json_response({"error": error}, status=400)
    return web.json_response({"id": "resp_1", "object": "response", "status": "completed", "output": [], "usage": None})


async def test_tools_of_codex_are_sent_as_functions_to_a_backend_that_knows_only_functions(backend: FakeNode) -> None:
    backend.speak = llamacpp
    send = {"type": "function", "name": "send", "parameters": {"type": "object"}}
    spaces = [{"type": "namespace", "name": name, "tools": [send]} for name in ("mail", "chat")]
    codex = {"input": "Hi", "store": False, "tools": [*spaces, {"type": "web_search"}, {"type": "image_generation"}]}
    async with gateway(backend) as cortex:
        for _ in range(2):
            status, response = await post(cortex, "/v1/responses", **codex)
            assert (status, response["output"][0]["name"], response["output"][0]["namespace"]) == (200, "send", "mail")
        names = [tool["function"]["name"] for tool in orjson.loads(backend.bodies[-1])["tools"]]
        assert (names, len(backend.bodies)) == (["mail__send", "chat__send"], 3)  # it has learned after one refusal
        for fields in ({"tools": [send]}, {"previous_response_id": "resp_1"}):
            status, response = await post(cortex, "/v1/responses", input="Hi", **fields)
            assert (status, response["id"]) == (200, "resp_1")
        status, error = await post(cortex, "/v1/responses", **codex | {"store": True})
        assert (status, "must be 'function'" in error["error"]["message"]) == (400, True)


async def test_backend_that_rejects_items_with_tools_gets_a_chat_request(backend: FakeNode) -> None:
    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/responses":
            error = {"message": "Unsupported Responses API input item type: 'additional_tools'", "code": None}
            return web.json_response({"error": error}, status=400)
        return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})

    backend.speak = speak
    send = {"type": "function", "name": "send", "parameters": {"type": "object"}}
    item = {"type": "additional_tools", "role": "developer", "tools": [send]}
    async with gateway(backend) as cortex:
        status, _ = await post(
            cortex, "/v1/responses", store=False, tool_choice="auto", input=[item, {"role": "user", "content": "Hi"}]
        )
    sent = orjson.loads(backend.bodies[-1])
    assert (status, [tool["function"]["name"] for tool in sent["tools"]]) == (200, ["send"])
    assert [message["role"] for message in sent["messages"]] == ["user"]


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        (
            {"type": "web_search", "search_context_size": "huge"},
            "Invalid value in tools[0].search_context_size: 'huge'",
        ),
        ({"type": "file_search", "vector_store_ids": []}, "Unsupported tool type: use 'function' or 'file_search'"),
    ],
)
async def test_rejected_tool_that_a_chat_request_cannot_express_is_an_error(
    backend: FakeNode, tool: dict[str, Any], text: str
) -> None:
    """If the gateway dropped the tool from then on, one malformed request would disable web search for later ones."""

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/chat/completions":
            return web.json_response({"id": "c1", "choices": [CHOICE], "usage": USAGE})
        return web.json_response({"error": {"message": text, "code": None}}, status=400)

    backend.speak = speak
    async with gateway(backend) as cortex:
        status, error = await post(cortex, "/v1/responses", input="Hi", tools=[tool])
        assert (status, error["error"]["message"], len(backend.bodies)) == (400, text, 1)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (b"'tools.0': Input tag 'namespace' found using 'type' does not match the expected tags: 'function'", True),
        (b"tools[0].type must be one of [function, mcp]", True),
        (b"only function tools are allowed", True),
        (b"Unsupported tool: namespace", True),
        (b"tools of type namespace are not supported", True),
        (b"tools[1].parameters: must be an object", False),
        (b"this model does not support tools", False),
    ],
)
def test_backend_errors_that_reject_a_tool_type_are_recognized(error: bytes, refused: bool) -> None:
    assert refuses_tool_types(error) is refused


@pytest.mark.parametrize("fields", [{"previous_response_id": "resp_1"}, {"store": True}])
async def test_request_for_a_stored_response_of_a_backend_without_responses_is_an_error(
    backend: FakeNode, fields: dict[str, Any]
) -> None:
    async with gateway(backend) as cortex:
        status, body = await post(cortex, "/v1/responses", input="Hi", **fields)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unsupported_parameter", next(iter(fields)))


def test_images_in_tool_messages_are_moved_to_a_user_message() -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    text = {"type": "text", "text": "seen"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "2"}]},
        {"role": "tool", "tool_call_id": "1", "content": [text, image]},
        {"role": "tool", "tool_call_id": "2", "content": "none"},
    ]
    sent = orjson.loads(for_backend(orjson.dumps({"model": "m", "messages": messages}), ()))["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool", "user"]
    assert [message["content"] for message in sent[2:4]] == ["seen", "none"]
    assert sent[4]["content"][1] == image
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'
    followed = [*messages, {"role": "user", "content": "What is it?"}]
    sent = orjson.loads(for_backend(orjson.dumps({"model": "m", "messages": followed}), ()))["messages"]
    assert [part.get("text") for part in sent[4]["content"]][-1] == "What is it?"
    assert len(sent) == 5


def test_functions_without_parameters_are_sent_with_an_empty_object_schema() -> None:
    empty = {"type": "object", "properties": {}}
    some = {"properties": {"a": {"type": "integer"}}}
    given: list[Any] = [None, {}, {"type": "object"}, some]
    functions = [{"name": "f", **({} if parameters is None else {"parameters": parameters})} for parameters in given]
    tools = [{"type": "function", "function": function} for function in functions]
    sent = orjson.loads(for_backend(orjson.dumps({"model": "m", "messages": [], "tools": tools}), ()))
    expected = [empty, empty, empty, {"type": "object", **some}]
    assert [tool["function"]["parameters"] for tool in sent["tools"]] == expected


def test_continue_final_message_is_sent_to_vllm_as_a_request_field() -> None:
    variables = {"enable_thinking": False, "add_generation_prompt": False, "continue_final_message": True}
    chat = {"model": "m", "messages": [{"role": "assistant", "content": "{"}], "chat_template_kwargs": variables}
    sent = orjson.loads(for_backend(orjson.dumps(chat), ()))
    assert (sent["add_generation_prompt"], sent["continue_final_message"]) == (False, True)
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}


def test_what_two_overlapping_requests_learned_about_a_backend_is_combined() -> None:
    known = BackendKnowledge()
    known.add("http://b", "m", Knowledge(refused=frozenset({"user"})))
    known.add("http://b", "m", Knowledge(alternates=True))  # this request began before the first one ended
    assert known.of("http://b", "m") == Knowledge(refused=frozenset({"user"}), alternates=True)


def test_what_requests_learned_about_a_backend_is_forgotten_after_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    known = BackendKnowledge()
    known.add("http://b", "m", Knowledge(alternates=True))
    later = time.monotonic() + KNOWLEDGE_SECS + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert known.of("http://b", "m") == Knowledge()
