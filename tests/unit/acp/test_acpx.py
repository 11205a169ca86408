"""The agent with acpx, a headless client from npm: single prompts, and sessions that continue."""

import asyncio
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from editors.recording_client import endpoint_environment
from npm import NODE, NODE_PATH, installed
from scripted.endpoint import ScriptedEndpoint
from scripted.script_steps import Call, Say

_ACPX = "acpx@0.19.1"
_INTEGRITY = "sha512-zKVZVM6tHGXmdXU+sC30jdFLzz0ZpNLMorYKH+it3XcuEcvFl20sLbHPqfdjfsLfV+PmhRDEm1b9Np5KxgFHow=="
TIMEOUT_SECONDS = 120  # generous limit for busy machines


@dataclass
class Acpx:
    """The acpx program, run in one project with its own home directory."""

    home: Path
    project: Path
    url: str

    async def run(self, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
        """Run acpx; return the JSON lines that it printed, which are all protocol messages."""
        modules = await asyncio.to_thread(installed, _ACPX, _INTEGRITY)
        agent = shlex.join([sys.executable, "-m", "helexa.acp"])
        settings = ["--agent", agent, "--cwd", str(self.project), "--format", "json", "--json-strict", "--ttl", "1"]
        known = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
        client = await asyncio.create_subprocess_exec(
            *(NODE, modules / "acpx/dist/cli.js", *settings, *arguments),
            cwd=self.project,
            env=known | {"PATH": NODE_PATH, "HOME": str(self.home)} | endpoint_environment(self.url),
            stdin=asyncio.subprocess.DEVNULL,
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
        assert client.returncode == status, output.decode() + errors.decode()
        return [json.loads(line) for line in output.decode().splitlines() if line.strip()]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/a.txt").write_text("one\ntwo\n")
    return tmp_path


def updates(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    all_updates = [line["params"]["update"] for line in lines if line.get("method") == "session/update"]
    return [update for update in all_updates if update["sessionUpdate"] == kind]


def statuses(lines: list[dict[str, Any]], call: str) -> list[str]:
    all_updates = [*updates(lines, "tool_call"), *updates(lines, "tool_call_update")]
    return [update["status"] for update in all_updates if update["toolCallId"] == call and "status" in update]


def stop_reasons(lines: list[dict[str, Any]]) -> list[str]:
    return [line["result"]["stopReason"] for line in lines if "stopReason" in (line.get("result") or {})]


async def test_acpx_exec_runs_a_task_with_the_agent(home: Path) -> None:
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
    assert "from the terminal" in json.dumps(endpoint.requests[-1].body["messages"])


async def test_tools_denied_by_acpx_fail_but_the_prompt_ends_normally(home: Path) -> None:
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
    assert len(endpoint.requests) == 2


async def test_session_resumes_in_a_new_process(home: Path) -> None:
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
    history = json.dumps(endpoint.requests[2].body["messages"])
    for expected in ("Mark what is in a.txt.", "Noted.", "one\\ntwo", "You said one and two.", "How many?"):
        assert expected in history


async def ended(home: Path) -> None:
    """Wait until no process with this home directory is running."""
    home_variable = os.fsencode(f"HOME={home}")
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            if not any(home_variable in _environ(process) for process in Path("/proc").glob("[0-9]*")):
                return
            await asyncio.sleep(0.1)


def _environ(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
