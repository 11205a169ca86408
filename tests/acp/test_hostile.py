"""Paths that lead out, names that disturb, and ten megabytes at once: over the wire they are refused or cut."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from editors.editor import agent_in_memory, settings_for
from scripted.endpoint import ScriptedEndpoint
from scripted.steps import Call, Say

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


async def results(project: Path, *calls: Call, **answers: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """What the model is told of each call, and all messages of the agent."""
    async with (
        ScriptedEndpoint(Say(calls=calls), Say("Done.")) as endpoint,
        agent_in_memory(settings_for(endpoint.url, project.parent)) as editor,
    ):
        editor.answers |= answers
        await editor.initialize()
        session = await editor.new(project)
        await editor.ask("session/set_mode", sessionId=session, modeId="bypassPermissions")
        assert await editor.prompt(session, "Go.") == "end_turn"
        return endpoint.asked[1].results, editor.received


async def test_no_path_leads_out_in_any_mode(project: Path) -> None:
    paths = ["../secret.txt", "way-out/secret.txt", "link.txt", "/etc/passwd", "a\0b", "half \ud83d", "x" * 2_000]
    calls = [Call("read_file", {"path": path}) for path in paths]
    calls += [Call("write_file", {"path": path, "content": "half \ud83d"}) for path in paths]
    calls += [Call("grep", {"pattern": "secret", "path": path}) for path in ("..", "way-out", "link.txt")]
    calls += [Call("list_dir", {"path": "way-out"}), Call("bash", {"command": "ls", "cwd": ".."})]
    told, received = await results(project, *calls)
    assert len(told) == len(calls) and "the secret" not in json.dumps([told, received])
    statuses = [
        message["params"]["update"].get("status") for message in received if "update" in message.get("params", {})
    ]
    assert statuses.count("failed") == len(calls) and statuses.count("completed") == 0
    assert (project.parent / "secret.txt").read_text() == "the secret"
    assert max(len(json.dumps(message)) for message in received) < 500_000


async def test_hostile_names_are_one_line_each(project: Path) -> None:
    (project / "bin").mkdir()
    told, received = await results(
        project, Call("list_dir"), Call("glob", {"pattern": "*.txt"}), Call("grep", {"pattern": "hostile"})
    )
    assert [len(content.split("\n")) for content in told] == [7, 4, 4]
    json.dumps(received, ensure_ascii=False).encode()  # no half characters


async def test_ten_megabytes_are_cut_for_the_model_and_for_the_editor(project: Path) -> None:
    (project / "large.txt").write_text("needle" + "x" * 3_000_000)
    told, received = await results(
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
    assert max(map(len, told)) < 100_000 and max(len(json.dumps(message)) for message in received[:-1]) < 16 << 20
    updates = [message for message in received if message.get("method") == "session/update"]
    assert max(len(json.dumps(update)) for update in updates) < 500_000
