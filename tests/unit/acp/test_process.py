"""The agent as a process: streams, exit, and recovery after a kill."""

import os
import subprocess
import sys
from pathlib import Path

import packages
from editors.recording_client import AgentProcess, agent_process, endpoint_environment
from scripted.endpoint import ScriptedEndpoint
from scripted.script_steps import Call, Say

CANDIDATE = "agent-client-protocol==1.0.0rc3"
CANDIDATE_SHA256 = "003c087eae1b03f2410f2e06bcfbaaa26ae99abbdd011c7a2183e5a699a3426f"
COMMAND = [sys.executable, "-m", "helexa.acp"]
BAD_LINES = [b"not json\n", b"\xff\xfe\n", b"\n", b"[" * 100_000 + b"\n", b'{"a":"\\ud800"}\n', b"null\n", b"[]\n"]


async def _converse(agent: AgentProcess, folder: Path) -> None:
    """Run one turn with two tool calls, and check the protocol messages."""
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


async def test_stdout_of_the_agent_has_only_json_rpc_and_invalid_lines_get_errors(tmp_path: Path):
    log = tmp_path / "acp.log"
    environ = {"HELEXA_ACP_LOG_FILE": str(log)}
    async with _script() as endpoint, agent_process(tmp_path, **endpoint_environment(endpoint.url), **environ) as agent:
        for line in BAD_LINES:
            agent.editor.send(line)
        await _converse(agent, tmp_path)
        errors = [message["error"]["code"] for message in agent.editor.received if "error" in message]
        assert errors == [-32700, -32700, -32700, -32700, -32600]
        assert await agent.close() == 0
    lines = [line.partition(" INFO ")[2] for line in log.read_text().splitlines()]
    steps = ("started version=", "session created session=", "turn ended session=", "stopped; ")
    assert [step for line in lines for step in steps if step in line] == list(steps)


async def test_agent_completes_and_cancels_prompts_of_a_client_with_the_next_sdk(tmp_path: Path):
    wheel = packages.wheel(CANDIDATE, CANDIDATE_SHA256)
    async with _script() as endpoint, agent_process(tmp_path, sdk=wheel, **endpoint_environment(endpoint.url)) as agent:
        await _converse(agent, tmp_path)
        endpoint.script[:] = [Say(calls=(Call("bash", {"command": "true"}),))]
        held_request = agent.editor.hold("session/request_permission")
        session = await agent.editor.new(tmp_path)
        id, waiting = agent.editor.start("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "run"}])
        request_id = await held_request
        agent.editor.notify("$/cancel_request", requestId=id)
        assert (await waiting)["error"]["code"] == -32800
        (canceled,) = await agent.editor.until(lambda: agent.editor.requests("$/cancel_request"))
        assert canceled == {"requestId": request_id}


async def test_rounds_that_were_finished_before_a_kill_are_in_the_resumed_session(tmp_path: Path):
    """The process is killed twice. A `usage_update` is sent only after its round is on disk."""
    async with ScriptedEndpoint(lambda _: Say("On it.", calls=(Call("list_dir", {"path": "."}),))) as endpoint:
        session, finished = await _killed(tmp_path, endpoint, None, 9)
        _, rounds_after = await _killed(tmp_path, endpoint, session, 23)
        assert rounds_after >= finished
        async with agent_process(tmp_path, **endpoint_environment(endpoint.url)) as agent:
            endpoint.script[:] = [Say("All there.")]
            endpoint.requests.clear()
            await agent.editor.request("session/resume", sessionId=session, cwd=str(tmp_path), mcpServers=[])
            await agent.editor.prompt(session, "and now?")
            assert len(endpoint.requests[0].results) >= rounds_after > 2


async def _killed(folder: Path, endpoint: ScriptedEndpoint, session: str | None, moment: int) -> tuple[str, int]:
    """Continue a session, and kill the agent after `moment` messages.

    Returns the session id and the number of rounds that must be on disk.
    """
    async with agent_process(folder, **endpoint_environment(endpoint.url)) as agent:
        editor = agent.editor
        await editor.initialize()
        if session is None:
            session = await editor.new(folder)
        else:
            await editor.request("session/load", sessionId=session, cwd=str(folder), mcpServers=[])
            await editor.until(lambda: editor.updates(session, "usage_update"))
        rounds = len(editor.updates(session, "tool_call"))
        received_before = len(editor.received)
        editor.start("session/prompt", sessionId=session, prompt=[{"type": "text", "text": "go"}])
        await editor.until(lambda: len(editor.received) >= received_before + moment)
        agent.process.kill()
        await agent.process.wait()
        await editor.read_all()
        updates = (message["params"]["update"] for message in editor.received[received_before:] if "id" not in message)
        kinds = [update["sessionUpdate"] for update in updates]
        return session, rounds + kinds.count("usage_update")


def test_agent_server_starts_without_importing_any_sdk():
    version = subprocess.run(
        [sys.executable, "-m", "helexa.acp", "--version"], capture_output=True, text=True, check=True
    )
    assert version.stdout.startswith("helexa-acp ")
    code = "import sys, helexa.acp.protocol.server; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"acp", "pydantic", "openai", "anthropic", "mcp", "httpx2", "aiohttp", "cyclopts"} & set(loaded)


def test_unknown_command_line_option_is_reported_in_one_line():
    run = subprocess.run([*COMMAND, "--nope"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "helexa-acp: unrecognized arguments: --nope; see helexa-acp --help\n"


def test_unknown_log_level_is_an_error():
    environ = os.environ | {"HELEXA_ACP_LOG": "LOUD"}
    run = subprocess.run(COMMAND, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "LOUD" in run.stderr and not run.stdout
