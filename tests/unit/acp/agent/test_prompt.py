"""The system prompt: environment, mode, and project instructions."""

import datetime
import os
from pathlib import Path

import pytest

from helexa.acp.agent.system_prompt_and_request import MAX_NOTE_BYTES, read_notes, system_prompt
from helexa.acp.config import Endpoint, Settings
from helexa.acp.host import LocalHost
from helexa.acp.tools.tool_and_effects import ToolContext


def context(cwd: Path, **options) -> ToolContext:
    settings = Settings(endpoints=(Endpoint(name="e", base_url="http://e/v1"),), default_endpoint="e", **options)
    return ToolContext("s", cwd, (cwd, cwd / "more"), cwd / "plans", LocalHost(), settings)


async def test_project_notes_are_read_from_the_repository_root_down_to_the_folder(tmp_path):
    (tmp_path / "AGENTS.md").write_text("not of the project")
    root = tmp_path / "project"
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "AGENTS.md").write_text("of the root")
    (root / "CLAUDE.md").write_text("passed over")
    (root / "a" / "CLAUDE.md").write_text("of a")
    (inner / "AGENTS.md").write_text("of b")
    notes = await read_notes(context(inner))
    assert notes.index("of the root") < notes.index("of a") < notes.index("of b")
    assert "not of the project" not in notes
    assert "passed over" not in notes


async def test_outside_a_repository_only_project_notes_in_the_folder_itself_are_read(tmp_path):
    (tmp_path / "AGENTS.md").write_text("above")
    (tmp_path / "work").mkdir()
    assert await read_notes(context(tmp_path / "work")) == ""


async def test_project_notes_are_truncated_and_links_out_of_the_project_are_ignored(tmp_path):
    (tmp_path / "secret").write_text("hush")
    work = tmp_path / "work"
    work.mkdir()
    (work / "AGENTS.md").symlink_to(tmp_path / "secret")
    assert "hush" not in await read_notes(context(work))
    (work / "AGENTS.md").unlink()
    (work / "AGENTS.md").write_bytes(b"\xff" + b"x" * 10 * MAX_NOTE_BYTES)
    notes = await read_notes(context(work))
    assert len(notes) < 2 * MAX_NOTE_BYTES
    assert "the rest of the file is left out" in notes
    (work / "AGENTS.md").unlink()
    (work / "AGENTS.md").mkdir()
    (work / "CLAUDE.md").symlink_to("AGENTS.md")
    assert await read_notes(context(work)) == ""


@pytest.mark.parametrize("mode", ["default", "acceptEdits", "plan", "bypassPermissions"])
def test_system_prompt_contains_environment_and_mode(tmp_path, mode):
    tool_context = context(tmp_path)
    prompt = system_prompt(tool_context.settings, tool_context, mode, "be kind")
    assert str(tmp_path) in prompt
    assert str(tmp_path / "more") in prompt
    assert datetime.date.today().isoformat() in prompt
    assert "be kind" in prompt
    assert (str(tmp_path / "plans") in prompt) == (mode == "plan")
    assert "{" not in prompt


def test_system_prompt_file_replaces_the_built_in_system_prompt(tmp_path):
    file = tmp_path / "prompt.md"
    file.write_text("You are {cwd}'s poet. {not} a field")
    tool_context = context(tmp_path, system_prompt_path=file)
    prompt = system_prompt(tool_context.settings, tool_context, "default", "")
    assert prompt.startswith(f"You are {tmp_path}'s poet. {{not}} a field")
    assert "coding agent" not in prompt


async def test_project_notes_that_link_to_a_secret_file_or_are_a_pipe_are_not_read(tmp_path):
    (tmp_path / ".env").write_text("hush")
    (tmp_path / "AGENTS.md").symlink_to(".env")
    os.mkfifo(tmp_path / "CLAUDE.md")
    assert await read_notes(context(tmp_path)) == ""
