"""Hostile input over the protocol: paths outside the project, disturbing file names, and 10 MB of output."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from editors.recording_client import agent_in_memory, settings_for
from scripted.endpoint import ScriptedEndpoint
from scripted.script_steps import Call, Say

_TEN_MEGABYTES = 10_000_000


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("the secret")
    (folder / "way-out").symlink_to("..")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    for name in (b"new\nline.txt", b"\xff\xfe.txt", b"\x1b[2Jclear.txt", b"--option.txt"):
        (folder / os.fsdecode(name)).write_text("hostile\n")
    return folder


async def results(project: Path, *calls: Call, **handlers: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Run the calls; return the results that the model receives, and all messages of the agent."""
    async with (
        ScriptedEndpoint(Say(calls=calls), Say("Done.")) as endpoint,
        agent_in_memory(settings_for(endpoint.url, project.parent)) as editor,
    ):
        editor.handlers |= handlers
        await editor.initialize()
        session = await editor.new(project)
        await editor.request("session/set_mode", sessionId=session, modeId="bypassPermissions")
        assert await editor.prompt(session, "Go.") == "end_turn"
        return endpoint.requests[1].results, editor.received


async def test_tool_calls_with_paths_outside_the_project_fail_even_in_bypass_mode(project: Path) -> None:
    paths = ["../secret.txt", "way-out/secret.txt", "link.txt", "/etc/passwd", "a\0b", "half \ud83d", "x" * 2_000]
    calls = [Call("read_file", {"path": path}) for path in paths]
    calls += [Call("write_file", {"path": path, "content": "half \ud83d"}) for path in paths]
    calls += [Call("grep", {"pattern": "secret", "path": path}) for path in ("..", "way-out", "link.txt")]
    calls += [Call("list_dir", {"path": "way-out"}), Call("bash", {"command": "ls", "cwd": ".."})]
    results_for_model, received = await results(project, *calls)
    assert len(results_for_model) == len(calls) and "the secret" not in json.dumps([results_for_model, received])
    statuses = [
        message["params"]["update"].get("status") for message in received if "update" in message.get("params", {})
    ]
    assert statuses.count("failed") == len(calls) and statuses.count("completed") == 0
    assert (project.parent / "secret.txt").read_text() == "the secret"
    assert max(len(json.dumps(message)) for message in received) < 500_000


async def test_hostile_file_names_in_tool_results_stay_on_one_line_each(project: Path) -> None:
    (project / "bin").mkdir()
    results_for_model, received = await results(
        project, Call("list_dir"), Call("glob", {"pattern": "*.txt"}), Call("grep", {"pattern": "hostile"})
    )
    assert [len(content.split("\n")) for content in results_for_model] == [7, 4, 4]
    json.dumps(received, ensure_ascii=False).encode()  # fails if a lone surrogate remains


async def test_tool_results_of_megabytes_are_truncated_for_model_and_client(project: Path) -> None:
    (project / "large.txt").write_text("needle" + "x" * 3_000_000)
    results_for_model, received = await results(
        project,
        Call("bash", {"command": f"head -c {_TEN_MEGABYTES} /dev/zero | tr '\\0' x"}),
        Call("read_file", {"path": "large.txt"}),
        Call("grep", {"pattern": "needle"}),
        Call("edit_file", {"path": "large.txt", "old_text": "needle", "new_text": "thread"}),
        **{
            "fs/read_text_file": lambda _: {"content": "needle" + "x" * _TEN_MEGABYTES},
            "fs/write_text_file": lambda _: {},
        },
    )
    assert (
        max(map(len, results_for_model)) < 100_000
        and max(len(json.dumps(message)) for message in received[:-1]) < 16 << 20
    )
    updates = [message for message in received if message.get("method") == "session/update"]
    assert max(len(json.dumps(update)) for update in updates) < 500_000
