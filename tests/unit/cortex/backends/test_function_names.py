"""A backend that refuses long names of functions gets short ones, and clients get the original names back."""

import json
import re
from typing import Any

import orjson
import pytest
from aiohttp import web
from emulator.quirk import DONE, delta, finish

from cortex.fake_node import USAGE, FakeNode, begin
from cortex.running_gateway import running_cortex
from helexa.cortex.backends.refused_messages_and_calls import refuses_names, with_short_names

LONG = "mcp__a_server_with_a_long_name__a_tool_with_a_name_that_is_longer_than_64_characters"
DOTTED = "files.read"
ERRORS = [
    "Invalid 'tools[0].function.name': string too long. Expected a string with maximum length 64, but got a string with"
    " length 84 instead.",
    "Invalid 'tools[0].function.name': string does not match pattern. Expected a string that matches the pattern"
    " '^[a-zA-Z0-9_-]+$'.",
    f"'{LONG}' does not match '^[a-zA-Z0-9_-]{{1,64}}$' - 'tools.0.function.name'",
    "Function name was files.read but must be a-z, A-Z, 0-9, or contain underscores and dashes, with a maximum length"
    " of 64.",
    "Invalid function name. Must start with a letter or an underscore. Must be alphanumeric (a-z, A-Z, 0-9),"
    " underscores (_), dots (.) or dashes (-), with a maximum length of 64.",
    "1 validation error detected: Value 'files.read' at 'toolConfig.tools.1.member.toolSpec.name' failed to satisfy"
    " constraint: Member must satisfy regular expression pattern: [a-zA-Z0-9_-]+",
    "1 validation error detected: Value at 'toolConfig.tools.1.member.toolSpec.name' failed to satisfy constraint:"
    " Member must have length less than or equal to 64",
]


def names_of(body: bytes) -> list[str]:
    """Return the names of functions in a request: offered, called before and forced."""
    chat = orjson.loads(body)
    calls = [call for message in chat["messages"] for call in message.get("tool_calls", ())]
    choice = chat.get("tool_choice")
    forced = [choice] if isinstance(choice, dict) else []
    return [entry["function"]["name"] for entry in (*chat["tools"], *calls, *forced)]


async def openai(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Refuse names as OpenAI does, and call the first function that is offered."""
    if request.path != "/v1/chat/completions":
        return web.json_response({"detail": "Not Found"}, status=404)
    names = names_of(await request.read())
    if not all(re.fullmatch("[a-zA-Z0-9_-]{1,64}", name) for name in names):
        return web.json_response({"error": {"message": ERRORS[0], "type": "invalid_request_error"}}, status=400)
    call: dict[str, Any] = {"id": "call00001", "type": "function", "function": {"name": names[0], "arguments": "{}"}}
    if not (await request.json()).get("stream"):
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return web.json_response({"id": "c1", "choices": [choice], "usage": USAGE})
    response = await begin(request)
    await response.write(delta(role="assistant", tool_calls=[{"index": 0, **call}]))
    await response.write(finish("tool_calls") + DONE)
    return response


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "default": DOTTED}}}


def request_body(path: str, name: str, *, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "Org/M", "stream": stream}
    if path == "/v1/messages":
        use = {"type": "tool_use", "id": "toolu_1", "name": name, "input": {}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "r"}
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [use]}]
        tool = {"name": name, "input_schema": SCHEMA}
        choice = {"type": "tool", "name": name}
        return body | {
            "max_tokens": 9,
            "messages": [*messages, {"role": "user", "content": [result]}],
            "tools": [tool],
            "tool_choice": choice,
        }
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "call00000", "name": name, "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "call00000", "output": "r"}
        return body | {
            "store": False,
            "input": [{"role": "user", "content": "Hi"}, call, output],
            "tools": [{"type": "function", "name": name, "parameters": SCHEMA}],
        }
    call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hi", "name": "Jane Doe"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "name": name, "content": "r"},
    ]
    function = {"name": name, "parameters": SCHEMA}
    choice = {"type": "function", "function": {"name": name}}
    return body | {"messages": messages, "tools": [{"type": "function", "function": function}], "tool_choice": choice}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("name", [LONG, DOTTED])
async def test_client_gets_its_own_function_name_if_the_backend_needs_a_shorter_one(
    path: str, name: str, stream: bool
) -> None:
    body, answer = request_body(path, name, stream=stream), ""
    async with FakeNode(speak=openai).holds("Org/M").serving() as backend:
        settings: dict[str, Any] = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
        async with running_cortex(backend, settings=settings) as cortex:
            for _ in range(2):
                backend.bodies.clear()
                async with cortex.client.post(cortex.url + path, json=body) as response:
                    answer = await response.text()
                assert response.status == 200, answer
                assert f'"name":"{name}"' in answer.replace('": "', '":"')
    assert len(backend.bodies) == 1, "the gateway learns from one refusal"
    (short,) = set(names_of(backend.bodies[0]))
    assert short not in answer
    assert orjson.loads(backend.bodies[0])["tools"][0]["function"]["parameters"] == SCHEMA


async def native(node: FakeNode, request: web.Request) -> web.StreamResponse:
    """Answer with the Responses API, refuse names as OpenAI does, and call the first function that is offered."""
    assert request.path == "/v1/responses"
    body = await request.json()
    names = [entry["name"] for entry in (*body["tools"], *body["input"], body["tool_choice"]) if "name" in entry]
    assert len(names) == 3
    if not all(re.fullmatch("[a-zA-Z0-9_-]{1,64}", name) for name in names):
        return web.json_response({"error": {"message": ERRORS[1], "type": "invalid_request_error"}}, status=400)
    item = {"type": "function_call", "id": "fc_1", "call_id": "call00001", "name": names[0], "arguments": "{}"}
    answer = {"id": "resp_1", "object": "response", "status": "completed", "tools": body["tools"], "output": [item]}
    if not body.get("stream"):
        return web.json_response(answer)
    events = [
        {"type": "response.output_item.added", "item": item},
        {"type": "response.completed", "response": answer},
    ]
    text = b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
    cut = text.index(names[0].encode()) + 5  # within the first name
    return await begin(request, text[:cut], text[cut:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [LONG, DOTTED, 'say "hi"'])
async def test_client_gets_its_own_function_name_from_a_native_responses_backend(name: str, stream: bool) -> None:
    body = request_body("/v1/responses", name, stream=stream) | {"tool_choice": {"type": "function", "name": name}}
    answer = ""
    async with FakeNode(speak=native).holds("Org/M").serving() as backend:
        settings: dict[str, Any] = {"neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}]}
        async with running_cortex(backend, settings=settings) as cortex:
            for _ in range(2):
                backend.bodies.clear()
                async with cortex.client.post(f"{cortex.url}/v1/responses", json=body) as response:
                    answer = await response.text()
                assert response.status == 200, answer
                named = f'"name":{json.dumps(name)}'
                assert answer.replace('": "', '":"').count(named) == (3 if stream else 2)
    assert len(backend.bodies) == 1, "the gateway learns from one refusal"
    sent = orjson.loads(backend.bodies[0])
    assert sent["tools"][0]["name"] not in answer
    assert sent["tools"][0]["parameters"] == SCHEMA
    assert sent["input"][0] == {"role": "user", "content": "Hi"}


def test_shortening_of_function_names_changes_no_other_names() -> None:
    body = orjson.dumps(request_body("/v1/chat/completions", DOTTED, stream=False))
    changed, originals = with_short_names(body)
    ((short, name),) = originals.items()
    assert name == DOTTED and re.fullmatch("[A-Za-z_][A-Za-z0-9_-]{0,63}", short)
    messages = orjson.loads(changed)["messages"]
    assert (messages[0]["name"], messages[2]["name"]) == ("Jane Doe", short)


@pytest.mark.parametrize("name", ["1st", "é" * 80, LONG, LONG + "2", "a b", "-x", '"' * 3])
def test_shortened_function_names_are_valid_and_distinct(name: str) -> None:
    tools = [{"type": "function", "function": {"name": name}}, {"type": "function", "function": {"name": LONG + "3"}}]
    _, originals = with_short_names(orjson.dumps({"tools": tools}))
    assert set(originals.values()) == {name, LONG + "3"}
    assert all(re.fullmatch("[A-Za-z_][A-Za-z0-9_-]{0,63}", short) for short in originals)


def test_request_with_valid_function_names_is_unchanged() -> None:
    body = orjson.dumps({"tools": [{"type": "function", "function": {"name": "read_file"}}]})
    assert with_short_names(body) == (body, {})


@pytest.mark.parametrize("text", ERRORS)
def test_backend_errors_about_function_names_are_recognized(text: str) -> None:
    assert refuses_names(orjson.dumps({"message": text}))


def test_other_backend_errors_are_not_taken_for_errors_about_function_names() -> None:
    assert not refuses_names(b'{"message": "This model\'s maximum context length is 8192 tokens."}')
    assert not refuses_names(b'{"message": "The model name is unknown."}')
