"""Files with secrets are read only after a question, and their text reaches the model in no other way."""

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helexa.acp.agent.system_prompt_and_request import read_notes
from helexa.acp.config import Mode
from helexa.acp.conversation_and_events import Text
from helexa.acp.tools.bash import Bash
from helexa.acp.tools.boundary_and_secrets import Boundary, is_secret
from helexa.acp.tools.files import EditFile
from helexa.acp.tools.permission_rules import Allowed, AskUser, Scope, rule
from helexa.acp.tools.vetted_commands import HARDENED, vetted_command

SECRETS = [
    *(".env", ".env.local", "deploy/prod.env", ".envrc", ".ssh/id_rsa", ".ssh/config", "id_ed25519", "server.key"),
    *("tls/server.pem", "a.p12", "a.jks", ".aws/credentials", ".aws/config", "credentials.json", ".netrc", ".npmrc"),
    *(".pypirc", ".git-credentials", ".pgpass", ".kube/config", ".docker/config.json", "secrets.yaml", "a.kdbx"),
    *("client_secret_1.json", "terraform.tfstate", "prod.tfvars", ".vault-token", "auth.json", ".htpasswd"),
    *("service-account.json", ".config/gh/hosts.yml", ".config/gcloud/credentials.db"),
]
ORDINARY = [".env.example", ".env.sample", "env.py", "id_rsa.pub", "keys.py", "secrets.py", "a.json", ".environment/a"]


class Answers:
    """A user who has allowed nothing permanently."""

    def ruling(self, scope: Scope) -> bool | None:
        return None

    def remember(self, scope: Scope, *, allowed: bool) -> None:
        raise AssertionError("no tool call remembers an answer")


def ruling(workplace: Any, name: str, mode: Mode = "default", **arguments: Any) -> object:
    tool = workplace.box.find(name)
    return rule(tool, tool.check(arguments), mode, workplace.context, Answers().ruling)


def _git(folder: Path, *arguments: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True)


@pytest.mark.parametrize("path", SECRETS)
def test_read_of_a_secret_file_needs_permission(workplace: Any, path: str) -> None:
    for mode in ("default", "acceptEdits", "plan"):
        asked = ruling(workplace, "read_file", mode, path=path)
        assert isinstance(asked, AskUser)
        assert [(offer.scope.label, offer.saved) for offer in asked.offers] == [(f"reads of {Path(path).name}", False)]
    assert isinstance(ruling(workplace, "read_file", "bypassPermissions", path=path), Allowed)
    assert isinstance(ruling(workplace, "grep", path=path, pattern="a"), AskUser)
    assert isinstance(ruling(workplace, "write_file", "acceptEdits", path=path, content=""), AskUser)
    _git(workplace.folder, "init", "-q")
    for command in ("cat", "head", "tail", "wc", "grep a", "git blame", "git diff", "git log -p --", "git show HEAD:"):
        line = f"{command}{'' if command.endswith(':') else ' '}{path}"
        assert vetted_command(line, workplace.folder, workplace.context.boundary) is None, line


def test_git_attributes_of_the_agent_hide_the_text_of_secret_files_in_diffs(tmp_path: Path) -> None:
    """The names in the attributes file agree with those in `is_secret`."""
    _git(tmp_path, "init", "-q")
    done = subprocess.run(
        ["git", "check-attr", "--stdin", "diff"],
        input="\n".join(SECRETS),
        cwd=tmp_path,
        env=os.environ | HARDENED,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{path}: diff: unset" for path in SECRETS]


@pytest.mark.parametrize("path", ORDINARY)
def test_read_of_an_ordinary_file_needs_no_permission(workplace: Any, path: str) -> None:
    assert isinstance(ruling(workplace, "read_file", path=path), Allowed)


def test_links_from_and_to_secret_files_need_permission(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").symlink_to(".env")
    (tmp_path / "prod.env").symlink_to("plain.txt")
    assert Boundary(tmp_path).resolve("notes.txt").secret
    assert Boundary(tmp_path).resolve("prod.env").secret


async def test_grep_of_a_folder_names_secret_files_without_their_text(workplace: Any) -> None:
    for path in (".env", "src/.ssh/config", "src/a.py"):
        (workplace.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (workplace.folder / path).write_text("TOKEN=hush\n")
    (workplace.folder / "src/link.py").symlink_to("../.env")
    content = (await workplace.call("grep", pattern="TOKEN")).content
    assert content.split("\n")[0] == "src/a.py:1: TOKEN=hush"
    assert content.count("hush") == 1
    assert "name one as `path` to ask the user: .env, src/.ssh/config" in content
    assert "[no matches]" in (await workplace.call("grep", pattern="TOKEN", path="src/.ssh")).content
    assert (await workplace.call("grep", pattern="TOKEN", path=".env")).content == ".env:1: TOKEN=hush"


async def test_preview_of_an_edit_of_a_secret_file_reveals_nothing_before_permission(workplace: Any) -> None:
    """An error before the question would tell the model which text is in the file."""
    (workplace.folder / ".env").write_text("TOKEN=hush\n")
    arguments = {"path": ".env", "old_text": "TOKEN=?", "new_text": "TOKEN="}
    shown = await EditFile().preview(arguments, workplace.context)
    assert "hush" not in str(shown)
    assert isinstance(ruling(workplace, "edit_file", "acceptEdits", **arguments), AskUser)


async def test_git_commands_that_print_secret_files_are_not_vetted(workplace: Any) -> None:
    folder = workplace.folder
    for path in (*SECRETS, "a.txt"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("TOKEN=hush\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        _git(folder, *command)
    for path in (*SECRETS, "a.txt"):
        (folder / path).write_text("TOKEN=hush again\n")

    async def ignore(content: object) -> None:
        pass

    for command in ("git diff", "git log -p", "git show"):
        assert vetted_command(command, folder, workplace.context.boundary) is not None
        arguments = {"command": command, "cwd": ".", "timeout": 60}
        content = (await Bash().run(arguments, workplace.context, ignore)).content
        shown = [line for line in content.split("\n") if "hush" in line and line[0] in "+-"]
        assert content.count("Binary files") == len(SECRETS)
        assert 1 <= len(shown) <= 2, shown


def test_git_show_of_the_object_id_of_a_secret_file_is_not_vetted(workplace: Any) -> None:
    folder, boundary = workplace.folder, workplace.context.boundary
    (folder / ".env").write_text("TOKEN=hush\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        _git(folder, *command)
    id = subprocess.check_output(["git", "rev-parse", "HEAD:.env"], cwd=folder, text=True).strip()
    for word in (id, id.upper(), id[:4], f"a-1-g{id[:12]}"):
        assert "hush" in subprocess.check_output(["git", "show", word], cwd=folder, text=True)
        assert vetted_command(f"git show {word}", folder, boundary) is None


@pytest.mark.parametrize("text", ["echo \x1b[2K\rls", "ls # \u202erm", "a\u200bb", "x" * 20_000 + "; rm -rf ~"])
async def test_permission_request_shows_the_whole_command_and_its_invisible_characters(
    workplace: Any, text: str
) -> None:
    (shown,) = await Bash().preview({"command": text, "cwd": "."}, workplace.context)
    assert isinstance(shown, Text)
    assert text.encode("unicode_escape").decode() in shown.text
    assert all(character.isprintable() or character == "\n" for character in shown.text)


async def test_permission_request_for_an_edit_lists_invisible_characters(workplace: Any) -> None:
    tool = workplace.box.find("write_file")
    arguments = {"path": "a.py", "content": "a = 1\nif admin: \u2066 # \u2069\nprint('\x1b[8m')\n"}
    note, diff = await tool.preview(arguments, workplace.context)
    assert "line 2: if admin: \\u2066 # \\u2069\nline 3: print('\\x1b[8m')" in note.text
    assert diff.new == arguments["content"]
    (only_diff,) = await tool.preview({"path": "a.py", "content": "\tа = 1\r\n"}, workplace.context)
    assert only_diff.new.startswith("\t")


def test_names_of_secret_files_are_recognized_in_upper_and_lower_case() -> None:
    assert is_secret(Path("a/.SSH/config")) and is_secret(Path(".ENV"))
    assert not is_secret(Path())


async def test_names_of_folders_above_the_project_do_not_make_its_files_secret(workplace: Any) -> None:
    folder = workplace.folder / ".docker/.ssh/project"
    folder.mkdir(parents=True)
    for path in ("a.txt", "AGENTS.md", ".env"):
        (folder / path).write_text("TOKEN=hush\n")
    (folder / "b").symlink_to("a.txt")
    workplace.context = context = dataclasses.replace(workplace.context, cwd=folder, roots=(folder,))
    for path in ("a.txt", "b", str(folder / "a.txt"), "../project/a.txt"):
        assert not context.boundary.resolve(path).secret
    assert context.boundary.resolve(str(folder / ".env")).secret
    assert "hush" in await read_notes(context)
    content = (await workplace.call("grep", pattern="TOKEN")).content
    assert "a.txt:1: TOKEN=hush" in content and ".env:1" not in content


async def test_grep_names_secret_files_by_their_path_in_the_project_without_their_text(workplace: Any) -> None:
    (workplace.folder / ".ssh/keys").mkdir(parents=True)
    (workplace.folder / ".ssh/keys/a").write_text("TOKEN=hush\n")
    content = (await workplace.call("grep", pattern="TOKEN", path=".ssh/keys")).content
    assert "hush" not in content and "ask the user: .ssh/keys/a" in content


async def test_grep_names_configuration_and_sessions_of_the_agent_without_their_text(
    workplace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = workplace.folder
    monkeypatch.setenv("HELEXA_ACP_CONFIG_PATH", str(folder / "agent/settings"))
    settings = msgspec.structs.replace(workplace.context.settings, data_dir=folder / "agent/data")
    workplace.context = dataclasses.replace(workplace.context, settings=settings)
    (folder / "agent/data/sessions").mkdir(parents=True)
    for path in ("agent/settings", "agent/data/sessions/a", "agent/other"):
        (folder / path).write_text("TOKEN=hush\n")
    for path in (".", "agent", "agent/data"):
        content = (await workplace.call("grep", pattern="TOKEN", path=path)).content
        assert content.count("hush") == (path != "agent/data")
        assert "agent/data/sessions/a" in content
    assert (await workplace.call("grep", pattern="TOKEN", path="agent/settings")).content.endswith("hush")
