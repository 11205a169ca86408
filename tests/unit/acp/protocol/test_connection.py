"""Valid and invalid messages of clients: each request gets one response, and no message ends the agent."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from editors.recording_client import Editor, ErrorResponse, agent_in_memory, memory, settings_for
from helexa.acp.config import ConfigError
from helexa.acp.protocol.request_handlers import Agent
from scripted.endpoint import ScriptedEndpoint
from scripted.script_steps import Say

METHODS = [*Agent.METHODS, "initialize", "authenticate", "logout", "$/cancel_request", "fs/read_text_file", "_ext/x"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))
NAMES = ["sessionId", "cwd", "mcpServers", "prompt", "modeId", "configId", "value", "cursor", "protocolVersion"]
NAMES += ["additionalDirectories", "clientCapabilities", "methodId", "requestId", "_meta"]
PARAMS = st.dictionaries(st.sampled_from(NAMES), JSON | st.just("/") | st.just("../../x"), max_size=6)
MESSAGES = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0")},
    optional={
        "method": st.sampled_from(METHODS) | JSON,
        "params": PARAMS | JSON,
        "id": JSON,
        "result": JSON,
        "error": JSON,
    },
)


@pytest.fixture
async def endpoint() -> AsyncIterator[ScriptedEndpoint]:
    async with ScriptedEndpoint(lambda _: Say("Hello.")) as endpoint:
        yield endpoint


@pytest.fixture
async def editor(endpoint: ScriptedEndpoint, tmp_path: Path) -> AsyncIterator[Editor]:
    async with agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        yield editor


async def test_request_initialize_is_answered_with_protocol_version_1_and_the_capabilities(editor: Editor):
    result = await editor.initialize()
    assert result["protocolVersion"] == 1
    assert result["agentCapabilities"]["sessionCapabilities"].keys() >= {"list", "resume", "close", "delete"}
    assert result["authMethods"][0].keys() == {"id", "name", "description"}
    second_result = await editor.request("initialize", protocolVersion=7, clientCapabilities={})
    assert second_result["protocolVersion"] == 1
    for version in (None, "1", True):
        with pytest.raises(ErrorResponse) as refused:
            await editor.request("initialize", protocolVersion=version)
        assert refused.value.error["code"] == -32602


async def test_unsupported_methods_and_invalid_params_are_rejected(editor: Editor, tmp_path: Path):
    for method in ("session/fork", "fs/read_text_file", "_helexa/x", "nonsense", "providers/list"):
        with pytest.raises(ErrorResponse) as refused:
            await editor.request(method)
        assert refused.value.error["code"] == -32601
    with pytest.raises(ErrorResponse) as refused:
        await editor.request("session/new", cwd=5, mcpServers=[{"name": "x", "command": ["secret"]}])
    assert refused.value.error["code"] == -32602
    assert "cwd" in refused.value.error["message"] and "secret" not in json.dumps(refused.value.error)
    acp_server = {"type": "acp", "name": "x", "serverId": "y", "id": "z"}
    with pytest.raises(ErrorResponse) as refused:
        await editor.request("session/new", cwd=str(tmp_path), mcpServers=[acp_server])
    assert refused.value.error["code"] == -32602


async def test_random_messages_get_one_response_each_and_do_not_end_the_agent(
    endpoint: ScriptedEndpoint, tmp_path: Path
):
    """After random messages, each request has exactly one response, and a valid request still works."""
    messages: list[Any] = []

    @settings(max_examples=250, deadline=None, database=None, derandomize=True)
    @given(message=MESSAGES | JSON)
    def collect(message: Any) -> None:
        messages.append(message)

    collect()
    async with memory(settings_for(endpoint.url, tmp_path)) as end:
        answered: dict[str, int] = {}
        for message in messages:
            if message is not None:
                await end.send(message)
        await end.send({"jsonrpc": "2.0", "id": "the end", "method": "initialize", "params": {"protocolVersion": 1}})
        waiting = {
            message["id"]
            for message in messages
            if isinstance(message, dict) and isinstance(message.get("method"), str) and _is_id(message.get("id"))
        } | {"the end"}
        while waiting - answered.keys():
            message = await end.receive()
            assert message["jsonrpc"] == "2.0"
            if "method" not in message:
                answered[message["id"]] = answered.get(message["id"], 0) + 1
                if message["id"] == "the end":
                    assert message["result"]["protocolVersion"] == 1


def _is_id(id: Any) -> bool:
    return isinstance(id, int | str) and not isinstance(id, bool)


async def test_running_acp_request_can_be_canceled(endpoint: ScriptedEndpoint, tmp_path: Path):
    endpoint.script[:] = [Say("Wait for it", hold_after=3), Say("Done.")]
    async with agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        session = await editor.new(tmp_path)
        id, waiting = editor.start("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "hi"}])
        await editor.until(lambda: editor.text(session))
        editor.notify("$/cancel_request", requestId=id)
        assert (await waiting)["error"]["code"] == -32800
        await endpoint.hung_up.wait()
        for unknown in (id, "x", None, True, [1], {}):
            editor.notify("$/cancel_request", requestId=unknown)
        assert await editor.prompt(session, "again") == "end_turn"


async def test_request_id_in_use_is_rejected(endpoint: ScriptedEndpoint, tmp_path: Path):
    endpoint.script[:] = [Say("Wait", hold_after=2)]
    async with agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        session = await editor.new(tmp_path)
        id, waiting = editor.start("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "hi"}])
        await editor.until(lambda: editor.text(session))
        editor.send({"jsonrpc": "2.0", "id": id, "method": "session/list", "params": {}})
        assert (await waiting)["error"]["code"] == -32600
        endpoint.released.set()
        await editor.until(lambda: [m for m in editor.received if m.get("result", {}).get("stopReason") == "end_turn"])


async def test_sessions_are_rejected_until_configuration_is_valid(tmp_path: Path):
    good = settings_for("http://127.0.0.1:9/v1", tmp_path)
    errors = [ConfigError("config.toml: unknown key 'modle'")] * 2

    def load() -> Any:
        if errors:
            raise errors.pop()
        return good

    async with agent_in_memory(load) as editor:
        await editor.initialize()
        with pytest.raises(ErrorResponse, match="unknown key 'modle'"):
            await editor.new(tmp_path)
        assert await editor.new(tmp_path)
