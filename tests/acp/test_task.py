"""A whole task, and what can go wrong on its way, in memory and by the words of the protocol."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from acp import schema
from msgspec.structs import replace

from editors.editor import Editor, Refused, agent_in_memory, allow, settings_for
from helexa.acp.config import WireApi
from helexa.acp.preferences import Preferences
from scripted.asked import Asked
from scripted.endpoint import ScriptedEndpoint
from scripted.steps import Call, Refuse, Say

CHECK = f"{sys.executable} -B check.py"  # what is edited within a second must not be taken from its bytecode


def _project(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "shop.py").write_text("PRICE = 2\n\n\ndef total(count):\n    return count + PRICE\n")
    (folder / "names.py").write_text("NAME = 'shpo'\n")
    (folder / "notes.md").write_text("The shpo sells.\n")
    (folder / "check.py").write_text(
        "from shop import total\nfrom names import NAME\nassert total(3) == 6, total(3)\nassert NAME == 'shop', NAME\n"
        "print('all good')\n"
    )
    (folder / "AGENTS.md").write_text("Spell everything right.\n")
    return folder


def _edit(path: str, old: str, new: str) -> Call:
    return Call("edit_file", {"path": path, "old_text": old, "new_text": new})


def _plan(*states: str) -> Call:
    tasks = ["find", "mend", "check"]
    entries = [{"content": task, "status": state} for task, state in zip(tasks, states, strict=True)]
    return Call("todo", {"tasks": entries})


STEPS = [
    Say("I plan.", "First a plan.", (_plan("in_progress", "pending", "pending"),)),
    Say(calls=(Call("list_dir", {"path": "."}), Call("grep", {"pattern": "shpo"}))),
    Say(calls=(Call("glob", {"pattern": "*.py"}),)),
    Say(calls=(Call("read_file", {"path": "shop.py"}), Call("read_file", {"path": "names.py"}))),
    Say("Now I mend.", calls=(_plan("completed", "in_progress", "pending"),)),
    Say(calls=(_edit("names.py", "shpo", "shop"),)),
    Say(calls=(_edit("notes.md", "shpo", "shop"),)),
    Say(calls=(Call("bash", {"command": CHECK}),)),
    Say("The sum is wrong.", calls=(_edit("shop.py", "count + PRICE", "count * PRICE"),)),
    Say(calls=(Call("bash", {"command": CHECK}),)),
    Say(calls=(_plan("completed", "completed", "completed"),)),
    Say("All is mended."),
]


async def _run_task(wire: WireApi, home: Path) -> tuple[list[Any], dict[str, str], ScriptedEndpoint]:
    work = _project(home / "work")
    async with (
        ScriptedEndpoint(*STEPS) as endpoint,
        agent_in_memory(settings_for(endpoint.url, home, wire_api=wire)) as editor,
    ):
        await editor.initialize()
        session = await editor.new(work)
        assert await editor.prompt(session, "Mend the shop") == "end_turn"
        for params in editor.told("session/update"):
            schema.SessionNotification.model_validate(params)
        for params in editor.told("session/request_permission"):
            schema.RequestPermissionRequest.model_validate(params)
        story = [_told(message, work) for message in editor.received if "method" in message]
        files = {path.name: path.read_text() for path in work.iterdir() if path.is_file()}
    return [told for told in story if told], files, endpoint


def _told(message: dict[str, Any], work: Path) -> Any:
    """What a message says, without ids and how text was cut into pieces."""
    if message["method"] != "session/update":
        return message["method"], str(message["params"].get("path", "")).replace(str(work), "")
    update = message["params"]["update"]
    match update["sessionUpdate"]:
        case "tool_call" | "tool_call_update" as kind:
            return kind, update.get("title"), update.get("status"), str(update.get("content")).replace(str(work), "")
        case "plan":
            return "plan", [entry["status"] for entry in update["entries"]]
        case "usage_update":
            return "usage", update["used"], update["size"]
        case _:
            return None


async def test_twelve_steps_go_the_same_way_through_all_wire_apis(tmp_path: Path):
    wires: list[WireApi] = ["openai-chat", "openai-responses", "anthropic-messages"]
    runs = {wire: await _run_task(wire, tmp_path / wire) for wire in wires}

    story, files, _ = runs["openai-chat"]
    assert files["shop.py"].endswith("return count * PRICE\n")
    assert (files["names.py"], files["notes.md"]) == ("NAME = 'shop'\n", "The shop sells.\n")
    commands = [
        told[3] for told in story if told[0] == "tool_call_update" and told[2] == "completed" and "exit" in told[3]
    ]
    assert "AssertionError" in commands[0] and "all good" in commands[1]
    assert story.count(("session/request_permission", "")) == 5
    assert [told[1] for told in story if told[0] == "plan"][-1] == ["completed"] * 3
    assert story[-1] == ("usage", 120, 32768)
    for wire in wires:
        assert runs[wire][0] == story
        assert runs[wire][1] == files
        assert len(runs[wire][2].asked) == len(STEPS)
        assert "Spell everything right." in str(runs[wire][2].asked[0].body)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return _project(tmp_path / "work")


async def _one(endpoint: ScriptedEndpoint, home: Path, work: Path, **answers: Any) -> tuple[Editor, str, str]:
    async with endpoint, agent_in_memory(settings_for(endpoint.url, home)) as editor:
        editor.answers |= answers
        await editor.initialize()
        session = await editor.new(work)
        return editor, session, await editor.prompt(session, "go")


async def test_a_denied_call_is_told_to_the_model_and_changes_nothing(tmp_path: Path, work: Path):
    endpoint = ScriptedEndpoint(Say(calls=(_edit("notes.md", "shpo", "shop"),)), Say("So be it."))
    deny = {"session/request_permission": lambda params: allow(params, "reject_once")}
    editor, session, stopped = await _one(endpoint, tmp_path, work, **deny)
    assert stopped == "end_turn" and editor.text(session) == "So be it."
    assert (work / "notes.md").read_text() == "The shpo sells.\n"
    assert [update["status"] for update in editor.updates(session, "tool_call_update") if "status" in update] == [
        "failed"
    ]


@pytest.mark.parametrize("answer", [None, {}, {"outcome": {"outcome": "selected", "optionId": "yes!"}}, "error"])
async def test_a_client_that_answers_nonsense_has_denied(answer: Any, tmp_path: Path, work: Path):
    def respond(params: Any) -> Any:
        if answer == "error":
            raise RuntimeError("no window")
        return answer

    endpoint = ScriptedEndpoint(Say(calls=(_edit("notes.md", "shpo", "shop"),)), Say("So be it."))
    _, _, stopped = await _one(endpoint, tmp_path, work, **{"session/request_permission": respond})
    assert stopped == "end_turn"
    assert (work / "notes.md").read_text() == "The shpo sells.\n"


async def test_always_is_remembered_for_the_project(tmp_path: Path, work: Path):
    edit = Say(calls=(_edit("notes.md", "sells", "sells."),))
    always = {"session/request_permission": lambda params: allow(params, "allow_always")}
    editor, _, _ = await _one(ScriptedEndpoint(edit, edit, Say("Done.")), tmp_path, work, **always)
    assert len(editor.told("session/request_permission")) == 1
    editor, _, _ = await _one(ScriptedEndpoint(edit, Say("Done.")), tmp_path, work)
    assert not editor.told("session/request_permission")


async def test_always_of_a_command_that_is_not_vetted_ends_with_its_session(tmp_path: Path, work: Path):
    check = Say(calls=(Call("bash", {"command": CHECK}),))
    always = {"session/request_permission": lambda params: allow(params, "allow_always")}
    editor, _, _ = await _one(ScriptedEndpoint(check, check, Say("Done.")), tmp_path, work, **always)
    (question,) = editor.told("session/request_permission")
    assert question["options"][1]["name"] == "Always allow exactly this command, in this session"
    editor, _, _ = await _one(ScriptedEndpoint(check, Say("Done.")), tmp_path, work)
    assert len(editor.told("session/request_permission")) == 1


async def test_always_of_a_vetted_command_is_remembered_for_the_project(tmp_path: Path, work: Path):
    always = {"session/request_permission": lambda params: allow(params, "allow_always")}
    list_all, list_one = (Say(calls=(Call("bash", {"command": line}),)) for line in ("ls -a", "ls names.py"))
    editor, _, _ = await _one(ScriptedEndpoint(list_all, list_one, Say("Done.")), tmp_path, work, **always)
    assert len(editor.told("session/request_permission")) == 1
    editor, _, _ = await _one(ScriptedEndpoint(list_one, Say("Done.")), tmp_path, work)
    assert not editor.told("session/request_permission")


@pytest.mark.parametrize(
    ("subject", "command"),
    [
        ("touch *", "touch owned"),
        ("=touch owned", "touch owned"),
        ("cat *", "cat /dev/null"),
        ("git *", "git --version"),
    ],
)
async def test_what_an_earlier_version_allowed_beyond_vetted_commands_is_asked_about(
    subject: str, command: str, tmp_path: Path, work: Path
):
    Preferences(tmp_path / "data").grant(str(work), "bash", subject, allowed=True)
    deny = {"session/request_permission": lambda params: allow(params, "reject_once")}
    endpoint = ScriptedEndpoint(Say(calls=(Call("bash", {"command": command}),)), Say("Done."))
    editor, _, _ = await _one(endpoint, tmp_path, work, **deny)
    assert len(editor.told("session/request_permission")) == 1
    assert not (work / "owned").exists()


async def test_a_client_that_refuses_files_fails_the_call_and_not_the_turn(tmp_path: Path, work: Path):
    def refuse(params: Any) -> Any:
        raise RuntimeError("not this file")

    endpoint = ScriptedEndpoint(Say(calls=(Call("read_file", {"path": "notes.md"}),)), Say("A pity."))
    editor, session, stopped = await _one(endpoint, tmp_path, work, **{"fs/read_text_file": refuse})
    assert stopped == "end_turn" and editor.text(session) == "A pity."
    assert "not this file" in str(endpoint.asked[1].body["messages"])


async def test_cancel_ends_the_stream_and_the_session_goes_on(tmp_path: Path, work: Path):
    endpoint = ScriptedEndpoint(Say("It begins", hold_after=3), Say("Again."))
    async with endpoint, agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        session = await editor.new(work)
        _, waiting = editor.start("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "go"}])
        await editor.until(lambda: editor.text(session) == "It begins")
        editor.tell("session/cancel", sessionId=session)
        assert (await waiting)["result"] == {"stopReason": "cancelled"}
        await endpoint.hung_up.wait()
        assert await editor.prompt(session, "once more") == "end_turn"
        assert "It begins" in str(endpoint.asked[1].body["messages"])


async def test_cancel_while_the_user_is_asked(tmp_path: Path, work: Path):
    endpoint = ScriptedEndpoint(Say(calls=(_edit("notes.md", "shpo", "shop"),)), Say("Again."))
    async with endpoint, agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        asked = editor.hold("session/request_permission")
        session = await editor.new(work)
        _, waiting = editor.start("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "go"}])
        question = await asked
        editor.tell("session/cancel", sessionId=session)
        assert (await waiting)["result"] == {"stopReason": "cancelled"}
        assert await editor.until(lambda: editor.told("$/cancel_request")) == [{"requestId": question}]
        assert await editor.prompt(session, "once more") == "end_turn"


async def test_two_sessions_at_once_do_not_mix(tmp_path: Path, work: Path):
    def answer(asked: Asked) -> Say:
        return Say("A" * 300 if "say A" in str(asked.conversation) else "B" * 300)

    endpoint = ScriptedEndpoint(answer)
    async with endpoint, agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        first, second = await editor.new(work), await editor.new(work)
        await asyncio.gather(editor.prompt(first, "say A"), editor.prompt(second, "say B"))
        assert (editor.text(first), editor.text(second)) == ("A" * 300, "B" * 300)


async def test_an_endpoint_that_fails_is_an_error_of_the_prompt_and_the_session_goes_on(tmp_path: Path, work: Path):
    refused = Refuse(401, {"error": {"message": "bad key sk-123", "type": "auth", "code": "invalid_api_key"}})
    endpoint = ScriptedEndpoint(refused, Say("Better."))
    async with endpoint, agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        await editor.initialize()
        session = await editor.new(work)
        with pytest.raises(Refused, match="refused the API key") as failed:
            await editor.prompt(session, "go")
        assert failed.value.error["data"] == {"kind": "auth"}
        editor.received.clear()
        assert await editor.prompt(session, "go on") == "end_turn"
        assert editor.text(session) == "Better."


async def test_commands_are_answered_without_the_model(tmp_path: Path, work: Path):
    models = {"object": "list", "data": [{"id": "scripted"}, {"id": "other"}]}
    endpoint = ScriptedEndpoint(lambda _: Say("A model."), models=models)
    async with endpoint, agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        session = await editor.new(work)
        await editor.prompt(session, "first")
        for command, word in {
            "/help": "/compact",
            "/status": "default:scripted",
            "/model": "default:scripted",
            "/model other": "default:other",
            "/mode": "acceptEdits",
            "/mode plan": "plan",
            "/mode nonsense": "no mode",
            "/clear": "nothing",
        }.items():
            editor.received.clear()
            assert await editor.prompt(session, command) == "end_turn"
            assert word in editor.text(session)
        assert len(endpoint.asked) == 1
        await editor.prompt(session, "/usr/bin is a path")
        assert "first" not in str(endpoint.asked[1].body["messages"])
        await editor.prompt(session, "/init briefly")
        asked = str(endpoint.asked[2].body["messages"])
        assert "AGENTS.md" in asked and "briefly" in asked


async def test_compact_sums_up_what_the_model_sees_from_then_on(tmp_path: Path, work: Path):
    endpoint = ScriptedEndpoint(Say("word " * 400), Say("THE SUMMARY"), Say("Going on."))
    async with endpoint, agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        await editor.initialize()
        session = await editor.new(work)
        await editor.prompt(session, "why " * 400)
        assert await editor.prompt(session, "/compact keep the names") == "end_turn"
        updates = editor.updates(session, "compaction_update")
        assert [update["status"] for update in updates] == ["in_progress", "completed"]
        assert editor.updates(session, "compaction_summary_chunk")
        assert "keep the names" in str(endpoint.asked[1].body["messages"])
        await editor.prompt(session, "second question")
        seen = str(endpoint.asked[2].body["messages"])
        assert 0 < seen.find("THE SUMMARY") < seen.find("second question")


async def test_models_are_grouped_by_their_endpoints_and_a_choice_is_asked_from_then_on(tmp_path: Path, work: Path):
    one, other = ScriptedEndpoint(Say("From one.")), ScriptedEndpoint(Say("From the other."))
    async with one, other:
        settings = settings_for(one.url, tmp_path)
        second = replace(
            settings.endpoints[0], name="other", base_url=settings_for(other.url, tmp_path).endpoints[0].base_url
        )
        async with agent_in_memory(replace(settings, endpoints=(*settings.endpoints, second))) as editor:
            session = await editor.new(work)
            options = {"configId": "model", "value": "other:scripted"}
            changed = (await editor.ask("session/set_config_option", sessionId=session, **options))["configOptions"]
            (model,) = [option for option in changed if option["id"] == "model"]
            assert [group["group"] for group in model["options"]] == ["default", "other"]
            assert [option["value"] for group in model["options"] for option in group["options"]] == [
                "default:scripted",
                "other:scripted",
            ]
            await editor.prompt(session, "Who are you?")
            assert editor.text(session) == "From the other."
            assert not one.asked


async def test_a_prompt_may_have_pictures_links_and_files(tmp_path: Path, work: Path):
    endpoint = ScriptedEndpoint(Say("Seen."))
    async with endpoint, agent_in_memory(settings_for(endpoint.url, tmp_path)) as editor:
        session = await editor.new(work)
        blocks = [
            {"type": "text", "text": "Look"},
            {"type": "image", "mimeType": "image/png", "data": "aGk="},
            {"type": "resource_link", "uri": f"file://{work}/a%20b.py", "name": "a b.py"},
            {"type": "resource", "resource": {"uri": f"file://{work}/notes.md", "text": "The shpo"}},
        ]
        await editor.ask("session/prompt", sessionId=session, prompt=blocks)
        sent = str(endpoint.asked[0].body["messages"])
        for part in ("data:image/png;base64,aGk=", f"[a b.py]({work}/a b.py)", "The shpo", f"{work}/notes.md"):
            assert part in sent
        picture = {"type": "image", "mimeType": "image/png", "data": "no base64!"}
        for bad in (
            [picture],
            [],
            [{"type": "text", "text": " "}],
            [{"type": "audio", "mimeType": "audio/wav", "data": "aGk="}],
        ):
            _, waiting = editor.start("session/prompt", sessionId=session, prompt=bad)
            assert (await waiting)["error"]["code"] == -32602
