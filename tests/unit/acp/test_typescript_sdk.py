"""The agent with a client built with the TypeScript SDK: tasks, resumed sessions, rejections and errors."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from editors.recording_client import endpoint_environment
from npm import NODE, installed
from scripted.endpoint import ScriptedEndpoint
from scripted.received_request import ReceivedRequest
from scripted.script_steps import Call, Say

_SDK = "@agentclientprotocol/sdk@2.4.0"
_INTEGRITY = "sha512-7qJ8nnyj7WesC5ve185ioTpB2/svQoeGV4HA4nLEhgDUrcmBe54/08VcXc/oL4p14tDbxxECZzdYmUYQ+4l+Wg=="
_SCRIPT = Path(__file__).parents[2] / "editors" / "sdk_client.mjs"
TIMEOUT_SECONDS = 120  # generous limit for busy machines

Events = list[tuple[str, Any]]
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
) -> Events:
    """Run the client with these steps and a new agent; return all events in the order of the client."""
    modules = await asyncio.to_thread(installed, _SDK, _INTEGRITY)
    instructions = {
        "sdk": str(modules / "@agentclientprotocol/sdk/dist/v1/stable/acp.js"),
        "agent": [sys.executable, "-m", "helexa.acp"],
        "steps": [[step] if isinstance(step[0], str) else step for step in steps],
        "decision": decision,
        "refuse": list(refuse),
        "end": end,
    }
    known = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ}
    client = await asyncio.create_subprocess_exec(
        *(NODE, _SCRIPT, json.dumps(instructions)),
        env=known | {"HOME": str(project.parent)} | endpoint_environment(url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            output, errors = await client.communicate()
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    assert client.returncode == 0, errors.decode()
    return [(event["kind"], event["value"]) for event in map(json.loads, output.decode().splitlines())]


def values(events: Events, kind: str) -> list[Any]:
    return [value for name, value in events if name == kind]


def updates(events: Events, kind: str, session: str | None = None) -> list[dict[str, Any]]:
    notifications = [value for value in values(events, "session/update") if session in (None, value["sessionId"])]
    return [item["update"] for item in notifications if item["update"]["sessionUpdate"] == kind]


def statuses(events: Events, call: str) -> list[str]:
    call_updates = [*updates(events, "tool_call"), *updates(events, "tool_call_update")]
    return [update["status"] for update in call_updates if update["toolCallId"] == call and "status" in update]


def shown(events: Events, call: str) -> list[dict[str, Any]]:
    """Return all contents of a call's card."""
    call_updates = [*updates(events, "tool_call"), *updates(events, "tool_call_update")]
    return [
        content for update in call_updates if update["toolCallId"] == call for content in update.get("content") or []
    ]


def sent_messages(request: ReceivedRequest) -> str:
    return json.dumps(request.body["messages"])


async def test_client_of_the_typescript_sdk_runs_a_task_and_resumes_its_session_after_a_kill(project: Path) -> None:
    plan = [{"content": "change two", "status": "in_progress"}]
    endpoint = ScriptedEndpoint(
        Say("I will plan.", calls=(Call("todo", {"tasks": plan}, "plan"),)),
        Say(calls=(Call("edit_file", {"path": "a.txt", "old_text": "two", "new_text": "2"}, "edit"),)),
        Say(calls=(Call("bash", {"command": "echo from the terminal; cat a.txt"}, "shell"),)),
        Say("It is done."),
        Say("As I said, it is done."),
    )
    async with endpoint:
        events = await drive(
            endpoint.url, project, ("session/new", {"cwd": str(project), "mcpServers": []}), prompt(0, "Change two.")
        )
        assert values(events, "session/prompt")[0]["stopReason"] == "end_turn"
        assert (project / "a.txt").read_text() == "one\n2\n"
        (entry,) = updates(events, "plan")[-1]["entries"]
        assert entry["content"] == "change two" and entry["status"] == "in_progress"
        permissions = values(events, "session/request_permission")
        assert [item["toolCall"]["toolCallId"] for item in permissions] == ["edit", "shell"]
        assert [option["kind"] for option in permissions[0]["options"]][:2] == ["allow_once", "allow_always"]
        for call in ("plan", "edit", "shell"):
            assert statuses(events, call)[0] == "pending" and statuses(events, call)[-1] == "completed"
        assert {"type": "terminal", "terminalId": "terminal-1"} in shown(events, "shell")
        assert [kind for kind, _ in events if kind.startswith("terminal/")] == [
            "terminal/create",
            "terminal/wait_for_exit",
            "terminal/output",
            "terminal/release",
        ]
        diff = {"type": "diff", "path": str(project / "a.txt"), "oldText": "one\ntwo\n", "newText": "one\n2\n"}
        assert diff in shown(events, "edit")
        assert updates(events, "usage_update")[-1]["size"] == 32768
        assert "from the terminal" in sent_messages(endpoint.requests[3])

        id = values(events, "session/new")[0]["sessionId"]
        resume = ("session/resume", {"sessionId": id, "cwd": str(project), "mcpServers": []})
        resumed = await drive(endpoint.url, project, resume, prompt(id, "Is it?"))
        assert values(resumed, "session/prompt")[0]["stopReason"] == "end_turn"
        assert [item["content"]["text"] for item in updates(resumed, "user_message_chunk")] == []
    history = sent_messages(endpoint.requests[4])
    for expected in (
        "Change two.",
        "I will plan.",
        "change two",
        "edited a.txt",
        "from the terminal",
        "It is done.",
        "Is it?",
    ):
        assert expected in history


async def test_tool_calls_that_the_user_rejects_fail_and_the_model_is_informed(project: Path) -> None:
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
        events = await drive(endpoint.url, project, new, prompt(0, "Go."), decision="reject_once")
    assert values(events, "session/prompt")[0]["stopReason"] == "end_turn"
    assert sorted(path.name for path in project.iterdir()) == ["a.txt"]
    assert [statuses(events, call)[-1] for call in ("write", "shell", "read")] == ["failed"] * 3
    assert "the secret" not in json.dumps(events) and "outside of this session" in sent_messages(endpoint.requests[1])


async def test_cancel_during_permission_request_ends_the_turn(project: Path) -> None:
    endpoint = ScriptedEndpoint(Say(calls=(Call("bash", {"command": "touch b.txt"}, "shell"),)), Say("On we go."))
    new = ("session/new", {"cwd": str(project), "mcpServers": []})
    async with endpoint:
        events = await drive(endpoint.url, project, new, prompt(0, "Go."), decision="cancel")
    assert values(events, "session/prompt")[0]["stopReason"] == "cancelled"
    assert not (project / "b.txt").exists() and len(endpoint.requests) == 1


async def test_errors_of_the_client_fail_the_tools_but_not_the_prompt(project: Path) -> None:
    refused = {"write": "fs/write_text_file", "read": "fs/read_text_file", "shell": "terminal/output"}
    calls = (
        Call("write_file", {"path": "b.txt", "content": "b"}, "write"),
        Call("read_file", {"path": "a.txt"}, "read"),
        Call("bash", {"command": "true"}, "shell"),
    )
    endpoint = ScriptedEndpoint(Say(calls=calls), Say("Never mind."))
    new = ("session/new", {"cwd": str(project), "mcpServers": []})
    async with endpoint:
        events = await drive(endpoint.url, project, new, prompt(0, "Go."), refuse=list(refused.values()))
    assert values(events, "session/prompt")[0]["stopReason"] == "end_turn"
    for call, method in refused.items():
        assert statuses(events, call)[-1] == "failed"
        assert f"no {method} today" in sent_messages(endpoint.requests[1])
    assert len(values(events, "terminal/release")) == 1


async def test_answers_of_concurrent_sessions_stay_separate(project: Path) -> None:
    def respond(request: ReceivedRequest) -> Say:
        name = "left" if "go left" in sent_messages(request) else "right"
        if request.results:
            return Say(f"{name} is done")
        return Say(calls=(Call("write_file", {"path": f"{name}.txt", "content": name}, name),))

    endpoint = ScriptedEndpoint(respond)
    new = ("session/new", {"cwd": str(project), "mcpServers": []})
    async with endpoint:
        events = await drive(endpoint.url, project, new, new, [prompt(0, "go left"), prompt(1, "go right")])
    assert [item["stopReason"] for item in values(events, "session/prompt")] == ["end_turn"] * 2
    assert {path.name: path.read_text() for path in project.glob("*t.txt")} == {
        "left.txt": "left",
        "right.txt": "right",
    }
    for new_session, name in zip(values(events, "session/new"), ("left", "right"), strict=True):
        chunks = updates(events, "agent_message_chunk", new_session["sessionId"])
        assert "".join(chunk["content"]["text"] for chunk in chunks) == f"{name} is done"
