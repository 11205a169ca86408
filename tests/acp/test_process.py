"""The agent as a process: its streams, its end, and what a sudden one leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import packages
from editors.editor import AgentProcess, agent_process, on
from scripted.endpoint import ScriptedEndpoint
from scripted.steps import Call, Say

CANDIDATE = "agent-client-protocol==1.0.0rc3"
CANDIDATE_SHA256 = "003c087eae1b03f2410f2e06bcfbaaa26ae99abbdd011c7a2183e5a699a3426f"
COMMAND = [sys.executable, "-m", "helexa.acp"]
BAD_LINES = [b"not json\n", b"\xff\xfe\n", b"\n", b"[" * 100_000 + b"\n", b'{"a":"\\ud800"}\n', b"null\n", b"[]\n"]


async def _converse(agent: AgentProcess, folder: Path) -> None:
    """One turn with two calls, by the rules of the protocol."""
    editor = agent.editor
    await editor.initialize()
    session = await editor.new(folder)
    assert await editor.prompt(session, "look and say") == "end_turn"
    states = [update["status"] for update in editor.updates(session) if update.get("status")]
    assert sorted(states) == sorted(["pending", "in_progress", "completed"] * 2)
    assert editor.text(session) == "I look.Done."
    (plan,) = editor.updates(session, "plan")
    assert [entry["content"] for entry in plan["entries"]] == ["say"]


def _script() -> ScriptedEndpoint:
    calls = (Call("list_dir", {"path": "."}), Call("todo", {"tasks": [{"content": "say", "status": "pending"}]}))
    return ScriptedEndpoint(Say("I look.", calls=calls), Say("Done."))


async def test_stdout_carries_json_rpc_only_and_bad_lines_are_answered(tmp_path: Path):
    async with _script() as endpoint, agent_process(tmp_path, **on(endpoint.url)) as agent:
        for line in BAD_LINES:
            agent.editor.send(line)
        await _converse(agent, tmp_path)
        errors = [message["error"]["code"] for message in agent.editor.received if "error" in message]
        assert errors == [-32700, -32700, -32700, -32700, -32600]
        assert await agent.close() == 0


async def test_the_next_sdk_works_as_well(tmp_path: Path):
    wheel = packages.wheel(CANDIDATE, CANDIDATE_SHA256)
    async with _script() as endpoint, agent_process(tmp_path, sdk=wheel, **on(endpoint.url)) as agent:
        await _converse(agent, tmp_path)
        endpoint.script[:] = [Say(calls=(Call("bash", {"command": "true"}),))]
        asked = agent.editor.hold("session/request_permission")
        session = await agent.editor.new(tmp_path)
        id, waiting = agent.editor.start("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "run"}])
        question = await asked
        agent.editor.tell("$/cancel_request", requestId=id)
        assert (await waiting)["error"]["code"] == -32800
        (withdrawn,) = await agent.editor.until(lambda: agent.editor.told("$/cancel_request"))
        assert withdrawn == {"requestId": question}


async def test_nothing_of_a_finished_round_is_lost_by_a_sudden_end(tmp_path: Path):
    """The process is killed at several moments of a session; usage is told when a round is on the disk."""
    async with ScriptedEndpoint(lambda _: Say("On it.", calls=(Call("list_dir", {"path": "."}),))) as endpoint:
        session, finished = await _killed(tmp_path, endpoint, None, 9)
        _, more = await _killed(tmp_path, endpoint, session, 23)
        assert more >= finished
        async with agent_process(tmp_path, **on(endpoint.url)) as agent:
            endpoint.script[:] = [Say("All there.")]
            endpoint.asked.clear()
            await agent.editor.ask("session/resume", sessionId=session, cwd=str(tmp_path), mcpServers=[])
            await agent.editor.prompt(session, "and now?")
            assert len(endpoint.asked[0].results) >= more > 2


async def _killed(folder: Path, endpoint: ScriptedEndpoint, session: str | None, moment: int) -> tuple[str, int]:
    """Go on with a session until so many messages have come: its id, and the rounds that it has for sure."""
    async with agent_process(folder, **on(endpoint.url)) as agent:
        editor = agent.editor
        await editor.initialize()
        if session is None:
            session = await editor.new(folder)
        else:
            await editor.ask("session/load", sessionId=session, cwd=str(folder), mcpServers=[])
            await editor.until(lambda: editor.updates(session, "usage_update"))
        kept = len(editor.updates(session, "tool_call"))
        before = len(editor.received)
        editor.start("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "go"}])
        await editor.until(lambda: len(editor.received) >= before + moment)
        agent.process.kill()
        await agent.process.wait()
        await editor.read_all()
        news = (message["params"]["update"] for message in editor.received[before:] if "id" not in message)
        told = [update["sessionUpdate"] for update in news]
        return session, kept + told.count("usage_update")


def test_the_command_line_is_small_and_quick():
    shown = subprocess.run(
        [sys.executable, "-m", "helexa.acp", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("helexa-acp ")
    code = "import sys, helexa.acp.protocol.server, helexa.acp.protocol.stdio; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"acp", "pydantic", "openai", "anthropic", "mcp", "httpx2", "aiohttp", "cyclopts"} & set(loaded)


def test_a_log_level_that_is_none_is_said():
    environ = os.environ | {"HELEXA_ACP_LOG": "LOUD"}
    run = subprocess.run(COMMAND, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "LOUD" in run.stderr and not run.stdout
