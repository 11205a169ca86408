"""Google's models get back the signatures of their tool calls, whatever API the client uses."""

import base64
from typing import Any

import orjson
import pytest
from aiohttp import web
from emulator.quirk import DONE, delta, finish

from cortex.fake_node import CHOICE, USAGE, FakeNode, begin
from cortex.running_gateway import Cortex, running_cortex
from helexa.cortex.backends.completion_choice import Changes, ToolCalls, split_signature

SIGNATURE = base64.b64encode(bytes(range(256)) + b"x").decode()
EXTRA = {"google": {"thought_signature": SIGNATURE}}
ERROR = (
    "Function call is missing a thought_signature in functionCall parts. This is required for tools to work correctly,"
    " and missing thought_signature may lead to degraded model performance. Additional data, function call"
    " `default_api:f` , position 2."
)


async def gemini(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Sign the first call of an answer, and refuse a conversation with a call that is not signed."""
    if request.path != "/v1/chat/completions":
        return web.json_response({"detail": "Not Found"}, status=404)
    body = await request.json()
    past = [message["tool_calls"] for message in body["messages"] if message.get("tool_calls")]
    if any(not calls[0].get("extra_content") for calls in past):
        error = {"code": 400, "message": ERROR, "status": "INVALID_ARGUMENT"}
        return web.json_response([{"error": error}], status=400)
    if past:
        return web.json_response({"id": "c2", "choices": [CHOICE], "usage": USAGE})
    function = {"name": "f", "arguments": "{}"}
    calls: list[dict[str, Any]] = [
        {"id": "function-call-1", "type": "function", "function": function, "extra_content": EXTRA},
        {"id": "function-call-2", "type": "function", "function": function},
    ]
    if not body.get("stream"):
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return web.json_response({"id": "c1", "choices": [choice], "usage": USAGE})
    response = await begin(request)
    for index, call in enumerate(calls):
        await response.write(delta(tool_calls=[{"index": index, **call}]))
    await response.write(finish("tool_calls") + DONE)
    return response


@pytest.fixture
async def backend():
    async with FakeNode(speak=gemini).holds("Org/M").serving() as backend:
        yield backend


@pytest.fixture
async def cortex(backend: FakeNode):
    settings: dict[str, Any] = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
    async with running_cortex(backend, settings=settings) as cortex:
        yield cortex


async def post(cortex: Cortex, path: str, body: dict[str, Any]) -> str:
    async with cortex.client.post(cortex.url + path, json={"model": "Org/M", **body}) as response:
        text = await response.text()
        assert response.status == 200, text
        return text


def events(text: str) -> list[Any]:
    return [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def sent_calls(backend: FakeNode) -> list[Any]:
    (message,) = [message for message in orjson.loads(backend.bodies[-1])["messages"] if message.get("tool_calls")]
    return message["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_client_gets_googles_thought_signature_in_googles_field_and_sends_it_back(
    backend: FakeNode, cortex: Cortex, stream: bool
) -> None:
    ask = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    text = await post(cortex, "/v1/chat/completions", ask)
    if stream:
        calls = [call for part in events(text) for call in part["choices"][0]["delta"].get("tool_calls") or ()]
    else:
        calls = orjson.loads(text)["choices"][0]["message"]["tool_calls"]
    assert [(call["id"], call.get("extra_content")) for call in calls] == [
        ("function-call-1", EXTRA),
        ("function-call-2", None),
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls]
    await post(
        cortex,
        "/v1/chat/completions",
        {"messages": [*ask["messages"], {"role": "assistant", "tool_calls": calls}, *results]},
    )
    assert len(backend.bodies) == 2
    assert [call.get("extra_content") for call in sent_calls(backend)] == [EXTRA, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_call_id_carries_googles_thought_signature_in_the_messages_api(
    backend: FakeNode, cortex: Cortex, stream: bool
) -> None:
    ask: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    text = await post(cortex, "/v1/messages", ask)
    if stream:
        begun = [part["content_block"] for part in events(text) if part["type"] == "content_block_start"]
    else:
        begun = orjson.loads(text)["content"]
    uses = [{**block, "input": {}} for block in begun if block["type"] == "tool_use"]
    assert len(uses) == 2
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "r"} for use in uses]
    turns = [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    await post(cortex, "/v1/messages", ask | {"stream": False, "messages": [*ask["messages"], *turns]})
    assert len(backend.bodies) == 2
    assert [(call["id"], call.get("extra_content")) for call in sent_calls(backend)] == [
        ("function-call-1", EXTRA),
        ("function-call-2", None),
    ]
    answered = [message.get("tool_call_id") for message in orjson.loads(backend.bodies[-1])["messages"]]
    assert answered[2:] == ["function-call-1", "function-call-2"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_call_id_carries_googles_thought_signature_in_the_responses_api(
    backend: FakeNode, cortex: Cortex, stream: bool
) -> None:
    ask: dict[str, Any] = {"input": [{"role": "user", "content": "Hi"}], "store": False, "stream": stream}
    text = await post(cortex, "/v1/responses", ask)
    output = events(text)[-1]["response"]["output"] if stream else orjson.loads(text)["output"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "r"} for call in output]
    backend.bodies.clear()
    await post(cortex, "/v1/responses", ask | {"stream": False, "input": [*ask["input"], *output, *outputs]})
    assert len(backend.bodies) == 1
    assert [(call["id"], call.get("extra_content")) for call in sent_calls(backend)] == [
        ("function-call-1", EXTRA),
        ("function-call-2", None),
    ]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_tool_call_without_a_thought_signature_gets_one_that_google_accepts(
    backend: FakeNode, cortex: Cortex, path: str
) -> None:
    """Calls of another model, or of a client that returns only known fields, have no signature."""
    call: dict[str, Any] = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "r"},
    ]
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": "call00001", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "call00001", "content": "r"}
        turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    for _ in range(2):
        backend.bodies.clear()
        await post(cortex, path, {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}, *turns]})
    assert len(backend.bodies) == 1, "the gateway learns from one refusal"
    (sent,) = sent_calls(backend)
    assert sent["extra_content"] == {"google": {"thought_signature": "skip_thought_signature_validator"}}


@pytest.mark.parametrize("size", [1, 2, 3, 6144])
def test_thought_signature_encoded_in_a_tool_call_id_is_decoded_unchanged(size: int) -> None:
    signature = base64.b64encode(b"\xfb\xff" * (size // 2) + b"\xff" * (size % 2)).decode()
    calls = ToolCalls(lambda _id: False, Changes(signed_ids=True))
    extra = {"google": {"thought_signature": signature}}
    (call,) = calls.read([{"id": "a_b", "function": {"name": "f"}, "extra_content": extra}], whole=True)
    assert call["id"].replace("-", "").replace("_", "").isalnum()
    assert split_signature(call["id"]) == ("a_b", signature)


@pytest.mark.parametrize("signature", ["", "a b", "abc-_===", "A" * 8196, 7, None])
def test_tool_call_id_carries_no_signature_that_is_too_long_or_not_base64(signature: Any) -> None:
    calls = ToolCalls(lambda _id: False, Changes(signed_ids=True))
    extra = {"google": {"thought_signature": signature}}
    (call,) = calls.read([{"id": "a", "function": {"name": "f"}, "extra_content": extra}], whole=True)
    assert call["id"] == "a"


@pytest.mark.parametrize(
    "id",
    [
        "functions.check_signature_of:0",
        "functions.check_signature_of:1",
        "call_signature_1",
        "functions.thought_signature_of:0",
        "functions.read_thought_signature_of:0",
        "_thought_signature_QUJD",
    ],
)
def test_tool_call_id_of_a_function_named_like_a_signature_is_unchanged(id: str) -> None:
    assert split_signature(id) == (id, None)
