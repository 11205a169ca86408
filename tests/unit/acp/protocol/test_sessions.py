"""Sessions over the protocol: order of updates, replay, lists, choices, and authentication."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from editors.recording_client import Editor, ErrorResponse, agent_in_memory, settings_for
from scripted.endpoint import ScriptedEndpoint
from scripted.script_steps import Say


@pytest.fixture
async def endpoint() -> AsyncIterator[ScriptedEndpoint]:
    models = {"object": "list", "data": [{"id": id} for id in ("scripted", "other", "other:7b")]}
    async with ScriptedEndpoint(lambda _: Say("Hello.", thought="hm"), models=models) as endpoint:
        yield endpoint


@pytest.fixture
async def editor(endpoint: ScriptedEndpoint, tmp_path: Path) -> AsyncIterator[Editor]:
    (tmp_path / "work").mkdir()
    async with agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        await editor.initialize()
        yield editor


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


def index_of_response(editor: Editor, id: int) -> int:
    return next(n for n, message in enumerate(editor.received) if message.get("id") == id and "method" not in message)


def index_of_update(editor: Editor, session_id: str, kind: str | None = None, start: int = 0) -> int:
    return next(
        n
        for n, message in enumerate(editor.received)
        if n >= start
        and message.get("method") == "session/update"
        and message["params"]["sessionId"] == session_id
        and kind in (None, message["params"]["update"]["sessionUpdate"])
    )


async def test_updates_of_a_new_session_are_sent_after_the_response_to_session_new(editor: Editor, work: Path):
    id, waiting = editor.start("session/new", cwd=str(work), mcpServers=[])
    result = (await waiting)["result"]
    session = result["sessionId"]
    await editor.until(lambda: editor.updates(session, "available_commands_update"))

    assert index_of_response(editor, id) < index_of_update(editor, session)
    options = {option["id"]: option for option in result["configOptions"]}
    assert list(options)[:2] == ["mode", "model"]
    assert options["mode"]["currentValue"] == result["modes"]["currentModeId"] == "default"
    assert options["model"]["currentValue"] == "default:scripted"
    for option in options.values():
        assert option["currentValue"] in [value["value"] for value in option["options"]]
    (commands,) = editor.updates(session, "available_commands_update")
    names = [command["name"] for command in commands["availableCommands"]]
    assert names == ["compact", "model", "mode", "permissions", "status", "clear", "init", "help"]


async def test_of_many_sessions_only_the_replay_of_session_load_is_sent_before_its_response(editor: Editor, work: Path):
    """Of 20 sessions opened at once, each gets its updates after the response, except the replayed history."""
    ids = await asyncio.gather(*(editor.new(work) for _ in range(20)))
    assert len(set(ids)) == 20
    await asyncio.gather(*(editor.prompt(id, f"hi {id}") for id in ids))
    received_before = len(editor.received)

    async def reopen(session: str, method: str) -> tuple[str, str, int]:
        id, waiting = editor.start(method, sessionId=session, cwd=str(work), mcpServers=[])
        assert "result" in await waiting
        return session, method, id

    opened = await asyncio.gather(
        *(reopen(id, "session/load" if n % 2 else "session/resume") for n, id in enumerate(ids)),
        *(editor.new(work) for _ in range(20)),
    )
    new = [opening for opening in opened if isinstance(opening, str)]
    await editor.until(lambda: all(editor.updates(id, "available_commands_update") for id in new))
    replayed_texts = [opening for opening in opened if not isinstance(opening, str)]
    await editor.until(
        lambda: all(len(editor.updates(id, "available_commands_update")) == 2 for id, _, _ in replayed_texts)
    )

    for session, method, id in replayed_texts:
        answered = index_of_response(editor, id)
        commands = index_of_update(editor, session, "available_commands_update", received_before)
        first = index_of_update(editor, session, None, received_before)
        assert answered < commands
        assert (first < answered) == (method == "session/load")
    for session in new:
        answered = next(
            n for n, message in enumerate(editor.received) if message.get("result", {}).get("sessionId") == session
        )
        assert answered < index_of_update(editor, session)


async def test_session_load_replays_the_history_and_session_resume_does_not(
    editor: Editor, work: Path, endpoint: ScriptedEndpoint
):
    session = await editor.new(work)
    assert await editor.prompt(session, "Say hello") == "end_turn"
    live = [update for update in editor.updates(session) if update["sessionUpdate"].endswith("_chunk")]
    await editor.request("session/close", sessionId=session)

    editor.received.clear()
    loaded = await editor.request("session/load", sessionId=session, cwd=str(work), mcpServers=[])
    replayed = [update for update in editor.updates(session) if update["sessionUpdate"].endswith("_chunk")]
    assert "sessionId" not in loaded and "configOptions" in loaded and "modes" in loaded
    assert replayed[0]["content"] == {"type": "text", "text": "Say hello"}
    text = {kind: "".join(c["content"]["text"] for c in live if c["sessionUpdate"] == kind) for kind in KINDS}
    replayed_texts = {
        kind: "".join(c["content"]["text"] for c in replayed if c["sessionUpdate"] == kind) for kind in KINDS
    }
    assert text == replayed_texts == {"agent_message_chunk": "Hello.", "agent_thought_chunk": "hm"}
    assert {update["messageId"] for update in live} == {update["messageId"] for update in replayed[1:]}

    await editor.until(lambda: editor.updates(session, "available_commands_update"))
    editor.received.clear()
    await editor.request("session/resume", sessionId=session, cwd=str(work))
    await editor.until(lambda: editor.updates(session, "available_commands_update"))
    assert not [update for update in editor.updates(session) if update["sessionUpdate"].endswith("_chunk")]
    await editor.prompt(session, "And again")
    texts = [message["content"] for message in endpoint.requests[-1].body["messages"] if message["role"] == "user"]
    assert "Say hello" in str(texts) and "And again" in str(texts)


KINDS = ("agent_message_chunk", "agent_thought_chunk")


async def test_session_has_title_and_is_listed_by_folder(editor: Editor, work: Path, tmp_path: Path):
    session = await editor.new(work)
    await editor.prompt(session, "Please  mend\nthe " + "very " * 30 + "old gate")
    (info,) = editor.updates(session, "session_info_update")
    other_session = await editor.new(tmp_path)

    listed = (await editor.request("session/list", cwd=str(work)))["sessions"]
    assert [(line["sessionId"], line["cwd"], line["title"]) for line in listed] == [(session, str(work), info["title"])]
    assert info["title"].startswith("Please mend the very") and len(info["title"]) <= 60
    both = (await editor.request("session/list"))["sessions"]
    assert {line["sessionId"] for line in both} == {session, other_session}
    with pytest.raises(ErrorResponse, match="cursor"):
        await editor.request("session/list", cursor="what?")


async def test_closed_session_can_be_resumed_and_a_deleted_one_cannot(editor: Editor, work: Path):
    session = await editor.new(work)
    await editor.request("session/close", sessionId=session)
    with pytest.raises(ErrorResponse, match="no session"):
        await editor.prompt(session, "hi")
    await editor.request("session/resume", sessionId=session, cwd=str(work), mcpServers=[])
    await editor.request("session/delete", sessionId=session)
    await editor.request("session/delete", sessionId=session)

    assert (await editor.request("session/list"))["sessions"] == []
    for method in ("session/load", "session/resume"):
        with pytest.raises(ErrorResponse) as refused:
            await editor.request(method, sessionId=session, cwd=str(work), mcpServers=[])
        assert refused.value.error["code"] == -32002
    with pytest.raises(ErrorResponse, match="no session"):
        await editor.request("session/close", sessionId=session)


async def test_changes_of_session_mode_and_config_option_mode_update_each_other(editor: Editor, work: Path):
    session = await editor.new(work)
    result = await editor.request("session/set_config_option", sessionId=session, configId="mode", value="plan")
    assert {option["id"]: option["currentValue"] for option in result["configOptions"]}["mode"] == "plan"
    update = await editor.until(lambda: editor.updates(session, "current_mode_update"))
    assert update[-1]["currentModeId"] == "plan"

    await editor.request("session/set_mode", sessionId=session, modeId="acceptEdits")
    await editor.until(lambda: len(editor.updates(session, "current_mode_update")) == 2)
    update = await editor.until(lambda: editor.updates(session, "config_option_update"))
    assert update[-1]["configOptions"][0]["currentValue"] == "acceptEdits"

    await editor.request("session/set_config_option", sessionId=session, configId="model", value="default:other:7b")
    await editor.request("session/set_config_option", sessionId=session, configId="temperature", value="precise")
    result = await editor.request(
        "session/set_config_option", sessionId=session, configId="thought_level", value="high"
    )
    values = {option["id"]: option["currentValue"] for option in result["configOptions"]}
    assert values == {
        "mode": "acceptEdits",
        "model": "default:other:7b",
        "thought_level": "high",
        "temperature": "precise",
    }
    for option, value in (("mode", "yolo"), ("model", ""), ("thought_level", "9"), ("color", "red")):
        with pytest.raises(ErrorResponse) as refused:
            await editor.request("session/set_config_option", sessionId=session, configId=option, value=value)
        assert refused.value.error["code"] == -32602


async def test_choice_of_a_model_that_is_not_listed_is_rejected(editor: Editor, work: Path):
    session = await editor.new(work)
    for value, hint in (
        ("default:scriptd", "did you mean 'scripted'?"),
        ("gpt", "known names: scripted, other, other:7b"),
    ):
        with pytest.raises(ErrorResponse) as refused:
            await editor.request("session/set_config_option", sessionId=session, configId="model", value=value)
        model = value.removeprefix("default:")
        assert refused.value.error["message"] == f"Invalid params: default has no model '{model}'; {hint}"
    await editor.prompt(session, "/model scriptd")
    text = "".join(update["content"]["text"] for update in editor.updates(session, "agent_message_chunk"))
    assert text == "The model is still `default:scripted`: default has no model 'scriptd'; did you mean 'scripted'?"


async def test_prompt_to_an_unreachable_endpoint_fails_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, work: Path
):
    monkeypatch.setattr("helexa.acp.agent.turn_loop_and_retries.MAX_BLIND_RETRIES", 0)
    work.mkdir()
    async with agent_in_memory(settings_for("http://127.0.0.1:1/v1", tmp_path)) as editor:
        await editor.initialize()
        session = await editor.new(work)
        with pytest.raises(ErrorResponse) as refused:
            await editor.request("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "hi"}])
    assert refused.value.error["code"] == -32603
    assert refused.value.error["data"] == {"kind": "unavailable"}
    assert "127.0.0.1:1" in refused.value.error["message"]


async def test_new_session_uses_the_saved_model_and_mode_of_the_project(
    endpoint: ScriptedEndpoint, tmp_path: Path, work: Path
):
    work.mkdir()
    settings = settings_for(endpoint.url, tmp_path)
    async with agent_in_memory(settings) as editor:
        session = await editor.new(work)
        await editor.request("session/set_config_option", sessionId=session, configId="model", value="default:other")
        await editor.request("session/set_mode", sessionId=session, modeId="plan")
    async with agent_in_memory(settings) as editor:
        replayed_texts = await editor.request("session/new", cwd=str(work), mcpServers=[])
        values = {option["id"]: option["currentValue"] for option in replayed_texts["configOptions"]}
        assert (values["model"], values["mode"]) == ("default:other", "plan")
        await editor.request("session/set_mode", sessionId=replayed_texts["sessionId"], modeId="bypassPermissions")
        resumed = await editor.request(
            "session/resume", sessionId=replayed_texts["sessionId"], cwd=str(work), mcpServers=[]
        )
        assert resumed["modes"]["currentModeId"] == "bypassPermissions"
        fresh = await editor.request("session/new", cwd=str(work), mcpServers=[])
        assert fresh["modes"]["currentModeId"] == "plan"  # bypassPermissions is not saved


async def test_session_with_an_invalid_folder_is_rejected(editor: Editor, work: Path):
    for cwd in ("relative", str(work / "missing"), "/\0", "", "/" + "x" * 5000):
        with pytest.raises(ErrorResponse) as refused:
            await editor.request("session/new", cwd=cwd, mcpServers=[])
        assert refused.value.error["code"] == -32602
    with pytest.raises(ErrorResponse, match="absolute"):
        await editor.request("session/new", cwd=str(work), mcpServers=[], additionalDirectories=["x"])


async def test_after_logout_sessions_are_rejected_until_authenticate(editor: Editor, work: Path):
    session = await editor.new(work)
    await editor.request("logout")
    with pytest.raises(ErrorResponse) as refused:
        await editor.new(work)
    assert refused.value.error["code"] == -32000
    with pytest.raises(ErrorResponse, match="methodId"):
        await editor.request("authenticate", methodId="magic")
    await editor.request("authenticate", methodId="configuration")
    assert await editor.request("session/resume", sessionId=session, cwd=str(work), mcpServers=[])


async def test_model_list_that_arrives_late_updates_the_options_and_the_default_model(
    endpoint: ScriptedEndpoint, tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
):
    work.mkdir()
    monkeypatch.setattr("helexa.acp.protocol.request_handlers.MODELS_WAIT_S", 0.01)
    endpoint.listing.clear()
    endpoint.models = {"data": [{"id": "found", "object": "model", "context_length": 20000}]}
    async with agent_in_memory(settings_for(endpoint.url, tmp_path, default_model="helexa/small")) as editor:
        session = await editor.new(work)
        prompted = asyncio.create_task(editor.prompt(session, "hi"))
        await asyncio.sleep(0)
        assert not endpoint.requests
        endpoint.listing.set()
        await prompted
        update = (await editor.until(lambda: editor.updates(session, "config_option_update")))[-1]
        assert {option["id"]: option["currentValue"] for option in update["configOptions"]}["model"] == "default:found"
        assert endpoint.requests[0].body["model"] == "found"
