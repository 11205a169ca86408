"""acpx, a headless client out of npm's registry, as its users run it: one-shot, and sessions that go on."""

import asyncio
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from editors.editor import on
from npm import NODE, NODE_PATH, installed
from scripted.endpoint import ScriptedEndpoint
from scripted.steps import Call, Say

_ACPX = "acpx@0.19.1"
_INTEGRITY = "sha512-zKVZVM6tHGXmdXU+sC30jdFLzz0ZpNLMorYKH+it3XcuEcvFl20sLbHPqfdjfsLfV+PmhRDEm1b9Np5KxgFHow=="
PATIENCE_SECONDS = 120  # a bound for waits on a busy machine, never a measure


@dataclass
class Acpx:
    """The program, in a project of its own."""

    home: Path
    project: Path
    url: str

    async def run(self, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
        """Run it; the lines of JSON that it printed: all that went over the wire."""
        modules = await asyncio.to_thread(installed, _ACPX, _INTEGRITY)
        agent = shlex.join([sys.executable, "-m", "helexa.acp"])
        settings = ["--agent", agent, "--cwd", str(self.project), "--format", "json", "--json-strict", "--ttl", "1"]
        known = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
        client = await asyncio.create_subprocess_exec(
            *(NODE, modules / "acpx/dist/cli.js", *settings, *arguments),
            cwd=self.project,
            env=known | {"PATH": NODE_PATH, "HOME": str(self.home)} | on(self.url),
            stdin=asyncio.subprocess.DEVNULL,
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
        assert client.returncode == status, output.decode() + errors.decode()
        return [json.loads(line) for line in output.decode().splitlines() if line.strip()]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/a.txt").write_text("one\ntwo\n")
    return tmp_path


def updates(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    found = [line["params"]["update"] for line in lines if line.get("method") == "session/update"]
    return [update for update in found if update["sessionUpdate"] == kind]


def statuses(lines: list[dict[str, Any]], call: str) -> list[str]:
    found = [*updates(lines, "tool_call"), *updates(lines, "tool_call_update")]
    return [update["status"] for update in found if update["toolCallId"] == call and "status" in update]


def stop_reasons(lines: list[dict[str, Any]]) -> list[str]:
    return [line["result"]["stopReason"] for line in lines if "stopReason" in (line.get("result") or {})]


async def test_one_shot(home: Path) -> None:
    endpoint = ScriptedEndpoint(
        Say("First, a plan.", calls=(Call("todo", {"tasks": [{"content": "change two"}]}, "plan"),)),
        Say(calls=(Call("edit_file", {"path": "a.txt", "old_text": "two", "new_text": "2"}, "edit"),)),
        Say(calls=(Call("bash", {"command": "cat a.txt; echo from the terminal"}, "shell"),)),
        Say("It is done."),
    )
    async with endpoint:
        lines = await Acpx(home, home / "project", endpoint.url).run("--approve-all", "exec", "Change two.")
    assert stop_reasons(lines) == ["end_turn"]
    assert (home / "project/a.txt").read_text() == "one\n2\n"
    assert updates(lines, "plan")[-1]["entries"][0]["content"] == "change two"
    assert updates(lines, "usage_update")[-1]["size"] == 32768
    assert [statuses(lines, call)[-1] for call in ("plan", "edit", "shell")] == ["completed"] * 3
    methods = [line["method"] for line in lines if "method" in line]
    assert {"fs/read_text_file", "fs/write_text_file", "terminal/create", "terminal/release"} <= set(methods)
    assert "from the terminal" in json.dumps(endpoint.asked[-1].body["messages"])


async def test_what_it_denies_fails_the_tool_and_not_the_prompt(home: Path) -> None:
    endpoint = ScriptedEndpoint(
        Say(
            calls=(
                Call("read_file", {"path": "a.txt"}, "read"),
                Call("write_file", {"path": "b.txt", "content": "b"}, "write"),
                Call("bash", {"command": "touch c.txt"}, "shell"),
            )
        ),
        Say("Nothing may be done."),
    )
    async with endpoint:
        lines = await Acpx(home, home / "project", endpoint.url).run("--deny-all", "exec", "Go.", status=5)
    assert stop_reasons(lines) == ["end_turn"]
    assert [statuses(lines, call)[-1] for call in ("read", "write", "shell")] == ["failed"] * 3
    assert sorted(path.name for path in (home / "project").iterdir()) == ["a.txt"]
    assert len(endpoint.asked) == 2


async def test_a_session_goes_on_in_a_new_process(home: Path) -> None:
    endpoint = ScriptedEndpoint(
        Say("Noted.", calls=(Call("read_file", {"path": "a.txt"}, "read"),)),
        Say("You said one and two."),
        Say("Two, as I said."),
    )
    async with endpoint:
        acpx = Acpx(home, home / "project", endpoint.url)
        await acpx.run("sessions", "new")
        await acpx.run("--approve-all", "prompt", "Mark what is in a.txt.")
        await ended(home)
        lines = await acpx.run("--approve-all", "prompt", "How many?")
        await ended(home)
    assert "session/resume" in [line.get("method") for line in lines]
    assert updates(lines, "user_message_chunk") == []
    history = json.dumps(endpoint.asked[2].body["messages"])
    for said in ("Mark what is in a.txt.", "Noted.", "one\\ntwo", "You said one and two.", "How many?"):
        assert said in history


async def ended(home: Path) -> None:
    """Wait until no agent with this home is left."""
    mark = os.fsencode(f"HOME={home}")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if not any(mark in _environ(process) for process in Path("/proc").glob("[0-9]*")):
                return
            await asyncio.sleep(0.1)


def _environ(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
