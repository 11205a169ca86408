"""glob and grep over real trees."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helexa.acp.conversation_and_events import Location
from helexa.acp.tools import search as search_module
from helexa.acp.tools.search_process import braces_expanded


@pytest.fixture
def tree(workplace: Any) -> Path:
    folder = workplace.folder
    for path, text in {
        "src/app.py": "import os\n\n\ndef main():\n    return os.getcwd()\n",
        "src/web/app.ts": "export const main = 1\n",
        "src/web/app.js": "main()\n",
        "docs/main.md": "# Main\n",
        "node_modules/x/main.py": "main\n",
        "build/out.py": "main\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "src/binary.bin").write_bytes(b"main\0main")
    (folder.parent / "outside.txt").write_text("main, the secret\n")
    (folder / "src/link.txt").symlink_to("../../outside.txt")
    (folder / "src/link-dir").symlink_to("../..")
    return folder


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout


async def test_glob_tool_matches_patterns_like_gitignore(workplace: Any, tree: Path) -> None:
    assert (await workplace.call("glob", pattern="*.py")).content == "build/out.py\nsrc/app.py"
    assert (await workplace.call("glob", pattern="src/**/*.{js,ts}")).content == "src/web/app.js\nsrc/web/app.ts"
    assert (await workplace.call("glob", pattern="*.py", path="src")).content == "src/app.py"
    assert (await workplace.call("glob", pattern="*.rs")).content == "[no files]"
    assert "is not a folder" in await workplace.failure("glob", pattern="*", path="src/app.py")
    assert "outside" in await workplace.failure("glob", pattern="*", path="src/link-dir")


async def test_grep_tool_returns_lines_and_locations(workplace: Any, tree: Path) -> None:
    result = await workplace.call("grep", pattern=r"^def main|os\.get", glob="*.py")
    assert result.content == "src/app.py:4: def main():\nsrc/app.py:5:     return os.getcwd()"
    assert result.locations == (Location(str(tree / "src/app.py"), 4), Location(str(tree / "src/app.py"), 5))
    assert (await workplace.call("grep", pattern="MAIN", path="docs")).content == "[no matches]"
    assert (
        await workplace.call("grep", pattern="MAIN", path="docs", ignore_case=True)
    ).content == "docs/main.md:1: # Main"
    assert (await workplace.call("grep", pattern="main", path="src/web/app.js")).content == "src/web/app.js:1: main()"
    assert "secret" not in (await workplace.call("grep", pattern="main")).content
    assert "not a regular expression" in await workplace.failure("grep", pattern="(")


async def test_search_tools_skip_ignored_files(workplace: Any, tree: Path) -> None:
    _git(tree, "init", "-q")
    (tree / ".gitignore").write_text("build/\nnode_modules/\n")
    assert (await workplace.call("glob", pattern="*.py")).content == "src/app.py"
    assert (await workplace.call("glob", pattern="*.py", path="build")).content == "build/out.py"


@pytest.mark.parametrize("path", [".", "evil"])
async def test_search_tools_run_no_program_that_a_repository_configures(
    workplace: Any, tree: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """git would run programs that the configuration of a folder names, for example to fetch a missing file."""
    programs = tree.parent / "programs"
    programs.mkdir()
    (programs / "git").write_text(f"#!/bin/sh\ntouch {tree.parent}/ran\n")
    (programs / "git").chmod(0o755)
    _git(tree, "init", "-q")
    _git(tree, "config", "core.fsmonitor", f"touch {tree.parent}/ran; false")
    (tree / "evil/objects").mkdir(parents=True)
    (tree / "evil/refs").mkdir()
    (tree / "evil/HEAD").write_text("ref: refs/heads/main\n")
    (tree / "evil/config").write_text(f"[core]\n\tworktree = files\n\tfsmonitor = touch {tree.parent}/ran\n")
    (tree / "evil/files").mkdir()
    (tree / "evil/files/app.py").write_text("main\n")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert "app.py" in (await workplace.call("glob", pattern="*.py", path=path)).content
    assert "main" in (await workplace.call("grep", pattern="main", path=path)).content
    assert not (tree.parent / "ran").exists()


async def test_grep_does_not_follow_a_tracked_folder_that_became_a_link(workplace: Any, tree: Path) -> None:
    (tree / "tracked").mkdir()
    (tree / "tracked/outside.txt").write_text("main\n")
    _git(tree, "init", "-q")
    _git(tree, "add", "tracked/outside.txt")
    (tree / "tracked/outside.txt").unlink()
    (tree / "tracked").rmdir()
    (tree / "tracked").symlink_to("../..")
    assert "secret" not in (await workplace.call("grep", pattern="main")).content


async def test_ignore_files_apply_as_in_git(workplace: Any, tree: Path) -> None:
    """The deepest ignore file decides, files below an ignored folder stay ignored, and links are not followed."""
    _git(tree, "init", "-q")
    files = {
        ".gitignore": "*.log\n/build\nnode_modules/\ndocs/*.tmp\n!keep.log\n",
        ".git/info/exclude": "private.txt\n",
        "src/.gitignore": "!important.log\n*.ts\n/app.py\n",
        "src/important.log": "", "src/other.log": "", "src/web/app.py": "", "keep.log": "", "a.log": "",
        "docs/a.tmp": "", "docs/deep/a.tmp": "", "build/.gitignore": "!*\n", "private.txt": "", "src/private.txt": "",
    }  # fmt: skip
    for path, text in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    listing = _git(tree, "ls-files", "-co", "--exclude-standard")
    expected = sorted(name for name in listing.split() if not (tree / name).is_symlink())
    assert (await workplace.call("glob", pattern="*")).content.split() == expected
    assert "docs/deep/a.tmp" in expected and "docs/a.tmp" not in expected


async def test_ignore_file_that_is_a_pipe_does_not_block_a_search(workplace: Any, tree: Path) -> None:
    _git(tree, "init", "-q")
    os.mkfifo(tree / ".gitignore")
    os.mkfifo(tree / "src/pipe.py")
    assert "src/app.py" in (await workplace.call("glob", pattern="*.py")).content


async def test_long_search_results_are_truncated_with_a_note(workplace: Any) -> None:
    (workplace.folder / "many.txt").write_text("needle\n" * 300)
    result = (await workplace.call("grep", pattern="needle")).content.split("\n")
    assert len(result) == 201 and result[-1] == "[there are more than these 200 matches]"
    (workplace.folder / "many.txt").write_text("x" * 100_000 + "needle" + "y" * 100_000)
    result = (await workplace.call("grep", pattern="needle")).content
    assert "needle" in result and len(result) < 400


async def test_hostile_file_names_are_escaped_in_search_results(workplace: Any) -> None:
    for name in (b"a\nb.txt", b"\xff.txt", b"--help.txt"):
        (workplace.folder / os.fsdecode(name)).write_text("needle\n")
    assert (await workplace.call("glob", pattern="*.txt")).content == "--help.txt\na\\nb.txt\n\\udcff.txt"
    assert len((await workplace.call("grep", pattern="needle")).content.split("\n")) == 3


async def test_grep_with_an_exponential_pattern_times_out(workplace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace.folder / "a.txt").write_text("a" * 60 + "\n")
    monkeypatch.setattr(search_module, "_SECONDS", 0.5)
    assert "took longer" in await workplace.failure("grep", pattern="(a+)+b")


async def test_cancellation_of_a_search_kills_its_process(workplace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (workplace.folder / "a.txt").write_text("a" * 60 + "\n")
    started: asyncio.Future[asyncio.subprocess.Process] = asyncio.get_running_loop().create_future()
    start = asyncio.create_subprocess_exec

    async def record_start(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        started.set_result(await start(*arguments, **options))
        return started.result()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", record_start)
    call = asyncio.create_task(workplace.call("grep", pattern="(a+)+b"))
    process = await started
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert process.returncode == -signal.SIGKILL


def test_braces_in_a_glob_pattern_expand_to_each_choice() -> None:
    assert sorted(braces_expanded("{a,b}/*.{c,d}")) == ["a/*.c", "a/*.d", "b/*.c", "b/*.d"]
    assert braces_expanded("a{b}c") == ["a{b}c"]
    assert len(braces_expanded("{a,b}" * 40)) <= 66
