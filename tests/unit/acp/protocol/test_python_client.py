"""The agent in memory with the protocol's Python SDK as the client, which validates every message."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from acp import schema
from acp.client.connection import ClientSideConnection
from acp.exceptions import RequestError

from editors.recording_client import memory, settings_for
from scripted.endpoint import ScriptedEndpoint
from scripted.script_steps import Call, Say


class Client:
    """A client that records updates and allows every call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.updates: list[Any] = []

    def on_connect(self, conn: Any) -> None:
        self.agent = conn

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        self.updates.append(update)

    async def request_permission(self, options: list[Any], session_id: str, tool_call: Any, **kwargs: Any) -> Any:
        allowed = next(option for option in options if option.kind == "allow_once")
        outcome = {"outcome": {"outcome": "selected", "optionId": allowed.option_id}}
        return schema.RequestPermissionResponse.model_validate(outcome)

    async def read_text_file(self, path: str, session_id: str, **kwargs: Any) -> Any:
        return schema.ReadTextFileResponse(content=Path(path).read_text())

    async def write_text_file(self, content: str, path: str, session_id: str, **kwargs: Any) -> Any:
        Path(path).write_text(content)
        return schema.WriteTextFileResponse()


async def test_client_of_the_python_sdk_creates_a_session_sends_prompts_and_ends_the_session(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\n")
    edit = Call("edit_file", {"path": "a.txt", "old_text": "one", "new_text": "two"})
    plan = Call("todo", {"tasks": [{"content": "edit"}]})
    client = Client(tmp_path)
    async with (
        ScriptedEndpoint(Say("I edit.", "hm", (plan, edit)), Say("Done.")) as endpoint,
        memory(settings_for(endpoint.url, tmp_path)) as end,
    ):
        agent: Any = ClientSideConnection(client, end, use_unstable_protocol=True)  # pyright: ignore
        files = schema.FileSystemCapabilities(read_text_file=True, write_text_file=True)
        capabilities = schema.ClientCapabilities(fs=files)
        hello = await agent.initialize(protocol_version=1, client_capabilities=capabilities)
        assert hello.agent_capabilities.load_session
        session = await agent.new_session(cwd=str(tmp_path), mcp_servers=[])
        modes = await agent.set_session_mode(mode_id="default", session_id=session.session_id)
        assert modes is not None
        response = await agent.prompt(
            prompt=[schema.TextContentBlock(type="text", text="go")], session_id=session.session_id
        )
        assert response.stop_reason == "end_turn"
        assert (tmp_path / "a.txt").read_text() == "two\n"
        kinds = {update.session_update for update in client.updates}
        assert kinds >= {"agent_message_chunk", "agent_thought_chunk", "tool_call", "tool_call_update", "plan"}
        assert kinds >= {"usage_update", "available_commands_update", "session_info_update", "config_option_update"}
        listed = await agent.list_sessions(cwd=str(tmp_path))
        assert [line.session_id for line in listed.sessions] == [session.session_id]
        await agent.close_session(session_id=session.session_id)
        client.updates.clear()
        await agent.load_session(cwd=str(tmp_path), session_id=session.session_id, mcp_servers=[])
        assert client.updates[0].session_update == "user_message_chunk"
        await agent.resume_session(cwd=str(tmp_path), session_id=session.session_id, mcp_servers=[])
        with pytest.raises(RequestError):
            await agent.set_session_mode(mode_id="yolo", session_id=session.session_id)
        await agent.close()
        await asyncio.sleep(0)
