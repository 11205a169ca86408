"""The three wire APIs with a scripted endpoint: requests, streams, errors, and tools as text."""

import asyncio
import contextlib
import json

import pytest

from helexa.acp.config import Endpoint, Settings
from helexa.acp.conversation_and_events import AssistantMessage, Image, Text, ToolCall, ToolResult, UserMessage
from helexa.acp.providers import connection_and_api_format
from helexa.acp.providers.models import ModelChoice, Models
from helexa.acp.providers.requests_and_events import (
    AnswerDelta,
    CallDelta,
    End,
    ModelRequest,
    ProviderError,
    ReasoningDelta,
    ToolSpec,
    Usage,
)
from scripted.endpoint import ScriptedEndpoint
from scripted.script_steps import Call, Reject, Say
from scripted.wire_formats import APIS

READ = ToolSpec(
    "read_file",
    "Read a file.",
    {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
)
REQUEST = ModelRequest("m", "Be kind.", [UserMessage("1", (Text("Hi"),))], [READ], max_tokens=4096)

every_api = pytest.mark.parametrize("api", APIS)


@contextlib.asynccontextmanager
async def provider(endpoint, api="openai-chat", **options):
    settings = Settings(
        endpoints=(Endpoint(name="e", base_url=endpoint.url, wire_api=api, **options),), default_endpoint="e"
    )
    models = Models(settings)
    try:
        yield await models.provider(ModelChoice("e", "m"))
    finally:
        await models.close()


async def ask(provider, request=REQUEST):
    """Send a request; return the answer's text, reasoning, calls (id, name, arguments), usage and end."""
    text, thought, calls, usage, end = "", "", {}, None, None
    async for event in provider.stream(request):
        assert end is None, "something came after the end"
        match event:
            case AnswerDelta(delta):
                text += delta
            case ReasoningDelta(delta):
                thought += delta
            case CallDelta(index, id, name, arguments):
                call = calls.setdefault(index, [None, None, ""])
                call[0], call[1] = call[0] or id, call[1] or name
                call[2] += arguments
            case Usage():
                usage = event
            case End():
                end = event
    return text, thought, [tuple(call) for call in calls.values()], usage, end


@every_api
async def test_answer_stream_yields_text_thought_usage_and_finish_reason(api):
    step = Say("Hëllo 👋 there", thought="hmm, well", tokens=(50, 7), cached=20)
    async with ScriptedEndpoint(step) as endpoint, provider(endpoint, api) as model:
        text, thought, calls, usage, end = await ask(model)
    assert (text, thought, calls) == ("Hëllo 👋 there", "hmm, well", [])
    assert usage == Usage(50, 7, cached=20)
    assert end.reason == "stop"
    (sent,) = endpoint.requests
    assert sent.path == APIS[api]
    assert sent.conversation == [("user", "Hi")]
    assert sent.system == "Be kind."
    assert sent.tools == ["read_file"]
    assert 4096 in sent.body.values()


@every_api
async def test_answer_stream_yields_tool_calls_with_names_ids_and_arguments(api):
    step = Say("Look:", calls=(Call("read_file", {"path": "ä"}), Call("read_file", {"path": "b" * 99})))
    async with ScriptedEndpoint(step) as endpoint, provider(endpoint, api) as model:
        text, _, calls, _, end = await ask(model)
    assert text == "Look:"
    assert [(id, name, json.loads(arguments)) for id, name, arguments in calls] == [
        ("call_1_0", "read_file", {"path": "ä"}),
        ("call_1_1", "read_file", {"path": "b" * 99}),
    ]
    assert end.reason == "tool_calls"


@every_api
@pytest.mark.parametrize("finish", ["length", "refusal"])
async def test_finish_reason_of_an_answer_is_reported_for_each_api(api, finish):
    async with ScriptedEndpoint(Say("a", finish=finish)) as endpoint, provider(endpoint, api) as model:
        *_, end = await ask(model)
    assert end.reason == finish


@every_api
async def test_conversation_history_is_sent_completely_in_each_api_format(api):
    image = Image("image/png", "cGl4ZWw=")
    messages = [
        UserMessage("1", (Text("Look"), image)),
        AssistantMessage(
            "2", "Two:", calls=(ToolCall("c1", "read_file", '{"path": "a"}'), ToolCall("c2", "list", "{}"))
        ),
        ToolResult("c1", "A", images=(image,)),
        ToolResult("c2", "ERROR: no", failed=True),
        AssistantMessage("3", "So."),
        UserMessage("4", (Text("Thanks"),)),
        UserMessage("5", (Text("Bye"),)),
    ]
    request = ModelRequest("m", "S", messages)
    async with ScriptedEndpoint(Say("!")) as endpoint, provider(endpoint, api) as model:
        await ask(model, request)
    conversation = endpoint.requests[0].conversation
    entries = [entry for entry in conversation if entry[0] != "result" and entry != ("user", "image")]
    assert entries[:4] == [
        ("user", "Look"),
        ("assistant", "Two:"),
        ("call", "read_file", '{"path": "a"}'),
        ("call", "list", "{}"),
    ]
    assert "\n\n".join(entry[1] for entry in entries[5:]) == "Thanks\n\nBye"
    assert [entry[1] for entry in conversation if entry[0] == "result"][1] == "ERROR: no"
    assert json.dumps(endpoint.requests[0].body).count("cGl4ZWw=") == 2


async def test_signatures_of_an_answer_are_sent_back_only_to_the_endpoint_that_sent_them():
    thinking = Say("a", thought="deep", calls=(Call("read_file", {"path": "x"}),))
    for api, sent in (
        ("anthropic-messages", '"signature": "signed"'),
        ("openai-chat", '"reasoning_content": "deep"'),
        ("openai-responses", '"encrypted_content": "sealed"'),
    ):
        async with ScriptedEndpoint(thinking, Say("b"), Say("c")) as endpoint, provider(endpoint, api) as model:
            text, thought, _, _, end = await ask(model)
            message = AssistantMessage("2", text, thought, (ToolCall("c1", "read_file", "{}"),), end.extras)
            messages = [*REQUEST.messages, message, ToolResult("c1", "x")]
            await ask(model, ModelRequest("m", "", messages))
            assert sent in json.dumps(endpoint.requests[1].body)
            elsewhere = {name: {**extras, "endpoint": "other"} for name, extras in end.extras.items()}
            messages[1] = AssistantMessage("2", text, thought, message.calls, elsewhere)
            await ask(model, ModelRequest("m", "", messages))
            assert "deep" not in json.dumps(endpoint.requests[2].body)


@every_api
@pytest.mark.parametrize("level", ["none", "low", "high"])
async def test_chosen_thought_level_is_sent_in_the_field_of_each_api(api, level):
    request = ModelRequest("m", "", REQUEST.messages, max_tokens=8192, thought_level=level)
    async with ScriptedEndpoint(Say("a"), Say("b")) as endpoint, provider(endpoint, api) as model:
        await ask(model, request)
        await ask(model)
    with_level, without_level = (sent.body for sent in endpoint.requests)
    if api == "openai-chat":
        assert with_level["reasoning_effort"] == level
        assert with_level["chat_template_kwargs"] == {"enable_thinking": level != "none"}
        assert ("x-include-thinking" in endpoint.requests[0].headers) == (level != "none")
        assert endpoint.requests[1].headers["x-include-thinking"] == "true"
    elif api == "openai-responses":
        assert with_level["reasoning"]["effort"] == level
    elif level == "none":
        assert with_level["thinking"] == {"type": "disabled"}
    else:
        assert with_level["thinking"] == {"type": "enabled", "budget_tokens": {"low": 2048, "high": 6553}[level]}
    assert not without_level.keys() & {"reasoning", "reasoning_effort", "chat_template_kwargs", "thinking"}


@every_api
async def test_cancellation_of_a_model_request_closes_its_connection(api):
    async with ScriptedEndpoint(Say("long " * 20, hold_after=5)) as endpoint, provider(endpoint, api) as model:
        task = asyncio.create_task(ask(model))
        await endpoint.holding.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await endpoint.hung_up.wait()


@every_api
@pytest.mark.parametrize("deltas", [0, 4])
async def test_stream_that_breaks_off_raises_a_provider_error(api, deltas):
    async with ScriptedEndpoint(Say("long " * 20, cut_after=deltas)) as endpoint, provider(endpoint, api) as model:
        with pytest.raises(ProviderError) as error:
            await ask(model)
    assert error.value.kind == ("interrupted" if deltas else "unavailable")


async def test_error_of_an_unreachable_endpoint_names_the_endpoint():
    async with ScriptedEndpoint() as endpoint:
        pass
    async with provider(endpoint) as model:
        with pytest.raises(ProviderError, match=f"cannot be reached at {endpoint.url}") as error:
            await ask(model)
    assert error.value.kind == "unavailable"


@every_api
async def test_api_keys_and_headers_in_environment_variables_are_not_sent_to_the_endpoint(api, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, "ambient")
    for name in ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS"):
        monkeypatch.setenv(name, "x-secret: ambient")
    async with ScriptedEndpoint(Say("a"), Say("b")) as endpoint:
        async with provider(endpoint, api) as model:
            await ask(model)
        async with provider(endpoint, api, api_key="mine", headers={"x-team": "blue"}) as model:
            await ask(model)
    without, with_key = (sent.headers for sent in endpoint.requests)
    assert "authorization" not in without
    assert with_key["authorization"] == "Bearer mine"
    assert with_key["x-team"] == "blue"
    assert "ambient" not in str(without) + str(with_key)


async def test_parameters_that_the_endpoint_rejects_are_omitted_in_later_requests():
    unknown = [
        Reject(400, {"error": {"message": f"Unsupported parameter: '{name}' is not supported with this model."}})
        for name in ("max_tokens", "chat_template_kwargs", "reasoning_effort")
    ]
    request = ModelRequest("m", "", REQUEST.messages, max_tokens=100, thought_level="low")
    async with ScriptedEndpoint(*unknown, Say("a"), Say("b")) as endpoint, provider(endpoint) as model:
        assert (await ask(model, request))[0] == "a"
        assert (await ask(model, request))[0] == "b"
    assert len(endpoint.requests) == 5
    for sent in endpoint.requests[3:]:
        assert sent.body["max_completion_tokens"] == 100
        assert not sent.body.keys() & {"max_tokens", "chat_template_kwargs", "reasoning_effort"}


async def test_thinking_budget_that_the_endpoint_rejects_is_replaced_by_effort():
    refused = Reject(
        400, {"type": "error", "error": {"message": "thinking.budget_tokens: not supported, use adaptive"}}
    )
    request = ModelRequest("m", "", REQUEST.messages, max_tokens=8192, thought_level="medium")
    async with ScriptedEndpoint(refused, Say("a")) as endpoint, provider(endpoint, "anthropic-messages") as model:
        await ask(model, request)
    assert endpoint.requests[1].body["thinking"]["type"] == "adaptive"
    assert endpoint.requests[1].body["output_config"] == {"effort": "medium"}


NO_TOOLS = [
    (400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'),
    (400, "registry.ollama.ai/library/gemma:2b does not support tools"),
    (400, "model 'small' was not made for tools: its chat template has none"),
    (404, "No endpoints found that support tool use"),
    (500, "tools param requires --jinja flag"),
    (422, "body.tools: Extra inputs are not permitted"),
]


@every_api
@pytest.mark.parametrize(("status", "message"), NO_TOOLS)
async def test_endpoint_that_rejects_tools_gets_tools_and_calls_as_text(api, status, message):
    call = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>'
    text_with_calls = f"I look.\n{call}\n<tool_call>[</tool_call>"
    refused = Reject(status, {"error": {"message": message}})
    async with (
        ScriptedEndpoint(refused, Say(text_with_calls), Say("ok")) as endpoint,
        provider(endpoint, api) as model,
    ):
        text, _, calls, _, end = await ask(model)
        assert (text, end.reason) == ("I look.\n", "tool_calls")
        assert calls == [(None, "read_file", '{"path": "a"}'), (None, None, "[")]
        message = AssistantMessage("2", text, calls=(ToolCall("c1", "read_file", '{"path": "a"}'),))
        messages = [*REQUEST.messages, message, ToolResult("c1", "content")]
        await ask(model, ModelRequest("m", "Be kind.", messages, [READ]))
    first, last = endpoint.requests[1:]
    assert first.tools == last.tools == []
    assert first.system.startswith("Be kind.")
    assert '"name": "read_file"' in first.system
    assert last.conversation[1:] == [
        ("assistant", f"I look.\n\n{call}"),
        ("user", "<tool_response>\ncontent\n</tool_response>"),
    ]


async def test_valid_tool_call_in_text_is_extracted_and_a_quoted_one_is_not():
    call = '<tool_call>{"name": "%s", "arguments": {"path": "a"}}</tool_call>'
    text_with_calls = f"<think>hm</think>See {call % 'read_file'}"
    quoted = f"Write ```\n{call % 'read_file'}\n``` or {call % 'unknown'}"
    both = Say(f"x{call % 'read_file'}", calls=(Call("read_file", {"path": "b"}),))
    async with (
        ScriptedEndpoint(Say(text_with_calls), Say(quoted), both) as endpoint,
        provider(endpoint) as model,
    ):
        assert (await ask(model))[:3] == ("See ", "hm", [(None, "read_file", '{"path": "a"}')])
        assert (await ask(model))[:3] == (quoted, "", [])
        assert (await ask(model))[2] == [("call_3_0", "read_file", '{"path": "b"}')]


async def test_setting_tool_calls_selects_native_tools_or_tools_as_text():
    refused = Reject(400, {"error": {"message": "tools are not supported"}})
    async with ScriptedEndpoint(Say("a"), refused) as endpoint:
        async with provider(endpoint, tool_calls="text") as model:
            await ask(model)
        async with provider(endpoint, tool_calls="native") as model:
            with pytest.raises(ProviderError):
                await ask(model)
    assert endpoint.requests[0].tools == []


@every_api
async def test_stream_of_invalid_data_raises_a_provider_error(api):
    async def nonsense(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for data in (b"[1]", b"null", b'{"choices": [{"delta": 5}], "usage": "x"}', b'{"type": 7, "index": "a"}', b"{"):
            writer.write(b"event: e\ndata: " + data + b"\n\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    endpoint = ScriptedEndpoint()
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server, provider(endpoint, api) as model:
        with pytest.raises(ProviderError, match="sent an invalid response"):
            await ask(model)


@every_api
@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
async def test_response_above_the_size_limit_raises_a_provider_error(api, status, monkeypatch):
    monkeypatch.setattr(connection_and_api_format, "MAX_BYTES", 1 << 20)

    async def endless(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-type: text/event-stream\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b": nothing\n\n" * 1000)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    endpoint = ScriptedEndpoint()
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server, provider(endpoint, api) as model:
        with pytest.raises(ProviderError, match="sent more than 1 MiB"):
            await ask(model)
