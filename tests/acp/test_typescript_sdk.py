"""A client on the TypeScript SDK: a task, its process killed, and on with it in a new one; denials and refusals."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from editors.editor import on
from npm import NODE, installed
from scripted.asked import Asked
from scripted.endpoint import ScriptedEndpoint
from scripted.steps import Call, Say

_SDK = "@agentclientprotocol/sdk@2.4.0"
_INTEGRITY = "sha512-7qJ8nnyj7WesC5ve185ioTpB2/svQoeGV4HA4nLEhgDUrcmBe54/08VcXc/oL4p14tDbxxECZzdYmUYQ+4l+Wg=="
_SCRIPT = Path(__file__).parent.parent / "editors" / "sdk_client.mjs"
PATIENCE_SECONDS = 120  # a bound for waits on a busy machine, never a measure

Seen = list[tuple[str, Any]]
Step = tuple[str, dict[str, Any]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo\n")
    return folder


def prompt(session: int | str, text: str) -> Step:
    return "session/prompt", {"sessionId": session, "prompt": [{"type": "text", "text": text}]}


async def drive(
    url: str,
    project: Path,
    *steps: Step | Sequence[Step],
    decision: str = "allow_once",
    refuse: Sequence[str] = (),
    end: str = "SIGKILL",
) -> Seen:
    """Have the client run these steps with an agent of its own; all that it saw, in its order."""
    modules = await asyncio.to_thread(installed, _SDK, _INTEGRITY)
    errand = {
        "sdk": str(modules / "@agentclientprotocol/sdk/dist/v1/stable/acp.js"),
        "agent": [sys.executable, "-m", "helexa.acp"],
        "steps": [[step] if isinstance(step[0], str) else step for step in steps],
        "decision": decision,
        "refuse": list(refuse),
        "end": end,
    }
    known = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    client = await asyncio.create_subprocess_exec(
        *(NODE, _SCRIPT, json.dumps(errand)),
        env=known | {"HOME": str(project.parent)} | on(url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            output, errors = await client.communicate()
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    assert client.returncode == 0, errors.decode()
    return [(seen["kind"], seen["value"]) for seen in map(json.loads, output.decode().splitlines())]


def of(seen: Seen, kind: str) -> list[Any]:
    return [value for name, value in seen if name == kind]


def updates(seen: Seen, kind: str, session: str | None = None) -> list[dict[str, Any]]:
    notifications = [value for value in of(seen, "session/update") if session in (None, value["sessionId"])]
    return [each["update"] for each in notifications if each["update"]["sessionUpdate"] == kind]


def statuses(seen: Seen, call: str) -> list[str]:
    found = [*updates(seen, "tool_call"), *updates(seen, "tool_call_update")]
    return [update["status"] for update in found if update["toolCallId"] == call and "status" in update]


def shown(seen: Seen, call: str) -> list[dict[str, Any]]:
    """All that the card of a call has shown."""
    found = [*updates(seen, "tool_call"), *updates(seen, "tool_call_update")]
    return [content for update in found if update["toolCallId"] == call for content in update.get("content") or []]


def told(asked: Asked) -> str:
    return json.dumps(asked.body["messages"])


async def test_a_task_is_done_its_process_killed_and_resumed_in_another(project: Path) -> None:
    plan = [{"content": "change two", "status": "in_progress"}]
    endpoint = ScriptedEndpoint(
        Say("I will plan.", calls=(Call("todo", {"tasks": plan}, "plan"),)),
        Say(calls=(Call("edit_file", {"path": "a.txt", "old_text": "two", "new_text": "2"}, "edit"),)),
        Say(calls=(Call("bash", {"command": "echo from the terminal; cat a.txt"}, "shell"),)),
        Say("It is done."),
        Say("As I said, it is done."),
    )
    async with endpoint:
        seen = await drive(
            endpoint.url, project, ("session/new", {"cwd": str(project), "mcpServers": []}), prompt(0, "Change two.")
        )
        assert of(seen, "session/prompt")[0]["stopReason"] == "end_turn"
        assert (project / "a.txt").read_text() == "one\n2\n"
        (entry,) = updates(seen, "plan")[-1]["entries"]
        assert entry["content"] == "change two" and entry["status"] == "in_progress"
        permissions = of(seen, "session/request_permission")
        assert [each["toolCall"]["toolCallId"] for each in permissions] == ["edit", "shell"]
        assert [option["kind"] for option in permissions[0]["options"]][:2] == ["allow_once", "allow_always"]
        for call in ("plan", "edit", "shell"):
            assert statuses(seen, call)[0] == "pending" and statuses(seen, call)[-1] == "completed"
        assert {"type": "terminal", "terminalId": "terminal-1"} in shown(seen, "shell")
        assert [kind for kind, _ in seen if kind.startswith("terminal/")] == [
            "terminal/create",
            "terminal/wait_for_exit",
            "terminal/output",
            "terminal/release",
        ]
        diff = {"type": "diff", "path": str(project / "a.txt"), "oldText": "one\ntwo\n", "newText": "one\n2\n"}
        assert diff in shown(seen, "edit")
        assert updates(seen, "usage_update")[-1]["size"] == 32768
        assert "from the terminal" in told(endpoint.asked[3])

        id = of(seen, "session/new")[0]["sessionId"]
        resume = ("session/resume", {"sessionId": id, "cwd": str(project), "mcpServers": []})
        again = await drive(endpoint.url, project, resume, prompt(id, "Is it?"))
        assert of(again, "session/prompt")[0]["stopReason"] == "end_turn"
        assert [each["content"]["text"] for each in updates(again, "user_message_chunk")] == []
    history = told(endpoint.asked[4])
    for said in (
        "Change two.",
        "I will plan.",
        "change two",
        "edited a.txt",
        "from the terminal",
        "It is done.",
        "Is it?",
    ):
        assert said in history


async def test_what_is_rejected_is_not_done_and_the_model_hears_of_it(project: Path) -> None:
    endpoint = ScriptedEndpoint(
        Say(
            calls=(
                Call("write_file", {"path": "b.txt", "content": "b"}, "write"),
                Call("bash", {"command": "touch c.txt"}, "shell"),
                Call("read_file", {"path": "../outside.txt"}, "read"),
            )
        ),
        Say("Well then."),
    )
    (project.parent / "outside.txt").write_text("the secret")
    new = ("session/new", {"cwd": str(project), "mcpServers": []})
    async with endpoint:
        seen = await drive(endpoint.url, project, new, prompt(0, "Go."), decision="reject_once")
    assert of(seen, "session/prompt")[0]["stopReason"] == "end_turn"
    assert sorted(path.name for path in project.iterdir()) == ["a.txt"]
    assert [statuses(seen, call)[-1] for call in ("write", "shell", "read")] == ["failed"] * 3
    assert "the secret" not in json.dumps(seen) and "outside of this session" in told(endpoint.asked[1])


async def test_a_cancel_while_the_user_is_asked_ends_the_turn(project: Path) -> None:
    endpoint = ScriptedEndpoint(Say(calls=(Call("bash", {"command": "touch b.txt"}, "shell"),)), Say("On we go."))
    new = ("session/new", {"cwd": str(project), "mcpServers": []})
    async with endpoint:
        seen = await drive(endpoint.url, project, new, prompt(0, "Go."), decision="cancel")
    assert of(seen, "session/prompt")[0]["stopReason"] == "cancelled"
    assert not (project / "b.txt").exists() and len(endpoint.asked) == 1


async def test_what_the_client_refuses_is_a_failed_tool_and_no_failed_prompt(project: Path) -> None:
    refused = {"write": "fs/write_text_file", "read": "fs/read_text_file", "shell": "terminal/output"}
    calls = (
        Call("write_file", {"path": "b.txt", "content": "b"}, "write"),
        Call("read_file", {"path": "a.txt"}, "read"),
        Call("bash", {"command": "true"}, "shell"),
    )
    endpoint = ScriptedEndpoint(Say(calls=calls), Say("Never mind."))
    new = ("session/new", {"cwd": str(project), "mcpServers": []})
    async with endpoint:
        seen = await drive(endpoint.url, project, new, prompt(0, "Go."), refuse=list(refused.values()))
    assert of(seen, "session/prompt")[0]["stopReason"] == "end_turn"
    for call, method in refused.items():
        assert statuses(seen, call)[-1] == "failed"
        assert f"no {method} today" in told(endpoint.asked[1])
    assert len(of(seen, "terminal/release")) == 1


async def test_two_sessions_at_once_do_not_meet(project: Path) -> None:
    def answer(asked: Asked) -> Say:
        name = "left" if "go left" in told(asked) else "right"
        if asked.results:
            return Say(f"{name} is done")
        return Say(calls=(Call("write_file", {"path": f"{name}.txt", "content": name}, name),))

    endpoint = ScriptedEndpoint(answer)
    new = ("session/new", {"cwd": str(project), "mcpServers": []})
    async with endpoint:
        seen = await drive(endpoint.url, project, new, new, [prompt(0, "go left"), prompt(1, "go right")])
    assert [each["stopReason"] for each in of(seen, "session/prompt")] == ["end_turn"] * 2
    assert {path.name: path.read_text() for path in project.glob("*t.txt")} == {
        "left.txt": "left",
        "right.txt": "right",
    }
    for new_session, name in zip(of(seen, "session/new"), ("left", "right"), strict=True):
        chunks = updates(seen, "agent_message_chunk", new_session["sessionId"])
        assert "".join(chunk["content"]["text"] for chunk in chunks) == f"{name} is done"
