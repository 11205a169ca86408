"""100 paths that a model may not use, or may use only after a question, whatever the user has allowed before."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helexa.acp.config import Mode
from helexa.acp.tools.permission_rules import Allowed, AskUser, Denied, Scope, rule

OUTSIDE = [
    *("..", "../", "../outside", "../outside/secret.txt", "../outside/new.txt", "src/../../outside/secret.txt"),
    *("./../outside/x", "src/./../../x", "//etc/passwd", "/", "/etc/passwd", "/etc/cron.d/x", "/dev/sda"),
    *("/proc/1/mem",),
    *("/proc/self/cwd/../x", "/proc/self/root/etc/passwd", "~", "~/x", "~/.ssh/id_rsa", "$HOME/.bashrc", "${HOME}/x"),
    *("way-out", "way-out/secret.txt", "way-out/new/file.txt", "secret-link", "dangling-link", "chain/secret.txt"),
    *("src/up/outside/secret.txt", "src/up/../outside/x", "etc/passwd", "a\0b", "half \ud83d a pair"),
    *("../project2/a.txt", "../project/../outside/x", "src/../way-out/x", "way-out/../secret.txt"),
]
RUN_LATER = [
    *(".git/config", ".git/hooks/pre-commit", ".GIT/config", "sub/.git/hooks/post-checkout", ".git", "hooks-link/x"),
    *("config-link", "settings-link/tasks.json", ".envrc", "sub/.envrc", ".vscode/tasks.json", ".vscode/settings.json"),
    *(".VSCode/launch.json", ".zed/tasks.json", ".idea/workspace.xml", ".fleet/run.json", ".husky/pre-commit"),
    *(".githooks/pre-commit", ".mcp.json", ".cursor/mcp.json", ".cursorrules", ".claude/settings.json"),
    *(".codex/config.toml",),
    *(".gitmodules", ".gitattributes", "sub/.gitattributes", ".gitconfig", ".devcontainer/devcontainer.json"),
    *(".devcontainer.json", ".bashrc", ".bash_profile", ".profile", ".zshrc", ".zshenv", ".config/fish/config.fish"),
    *(".ssh/authorized_keys", ".ssh/config", ".github/workflows/ci.yml", ".github/actions/a/action.yml"),
    *(".gitlab-ci.yml", ".circleci/config.yml", "Jenkinsfile", "azure-pipelines.yml", ".pre-commit-config.yaml"),
    *("lefthook.yml", ".npmrc", ".yarnrc.yml", ".cargo/config.toml", "sitecustomize.py", "usercustomize.py", "a.pth"),
    *("a.code-workspace", ".vimrc", ".nvim.lua", ".exrc", ".emacs.d/init.el", ".dir-locals.el", ".gdbinit"),
    *(".tmux.conf",),
    *(".config/helexa-acp/config.toml", ".local/share/helexa-acp/projects/a.json", ".config/autostart/a.desktop"),
    *(".config/systemd/user/a.service", "Makefile", "GNUmakefile", "sub/makefile", "justfile", "conftest.py"),
    *("setup.py",),
    *("package.json", "build.rs", "AGENTS.md", "CLAUDE.md", "agent/config.toml", "agent/data/projects/a.json"),
]
SECRETS = [".env", ".env.local", "prod.env", "env-link", "server.key", "id_ed25519", ".aws/credentials", ".netrc"]


@dataclass
class User:
    """A user who always allows what an ordinary edit offers, for each folder of the project."""

    allowed: set[tuple[str, str]] = field(default_factory=set)

    def ruling(self, scope: Scope) -> bool | None:
        return True if (scope.tool, scope.subject) in self.allowed else None

    def remember(self, scope: Scope, *, allowed: bool) -> None:
        self.allowed.add((scope.tool, scope.subject))


@pytest.fixture
def project(workplace: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A project with links to folders and files outside, and to files that need a question."""
    root, outside = workplace.folder, workplace.folder.parent / "outside"
    for folder in (outside, root / "src", root / ".git/hooks", root.parent / "project2"):
        folder.mkdir(parents=True)
    (outside / "secret.txt").write_text("secret")
    for link, target in {
        "way-out": "../outside",
        "secret-link": "../outside/secret.txt",
        "dangling-link": "../outside/new.txt",
        "chain": "way-out",
        "src/up": "../..",
        "etc": "/etc",
        "hooks-link": ".git/hooks",
        "config-link": ".git/config",
        "settings-link": ".vscode",
        "env-link": ".env",
    }.items():
        (root / link).symlink_to(target)
    monkeypatch.setenv("HOME", str(root.parent / "home"))
    monkeypatch.setenv("HELEXA_ACP_CONFIG_PATH", str(root / "agent/config.toml"))
    settings = msgspec.structs.replace(workplace.context.settings, data_dir=root / "agent/data")
    return dataclasses.replace(workplace, context=dataclasses.replace(workplace.context, settings=settings))


def ruling(project: Any, name: str, mode: Mode, user: User, path: str) -> object:
    arguments = {
        "write_file": {"path": path, "content": ""},
        "edit_file": {"path": path, "old_text": "a", "new_text": "b"},
        "read_file": {"path": path},
        "grep": {"path": path, "pattern": "a"},
        "glob": {"path": path, "pattern": "*"},
        "list_dir": {"path": path},
    }[name]
    tool = project.box.find(name)
    return rule(tool, tool.check(arguments), mode, project.context, user.ruling)


@pytest.fixture
def user(project: Any) -> User:
    user = User()
    for folder in (".", *(str(Path(path).parent) for path in (*RUN_LATER, *SECRETS))):
        asked = ruling(project, "write_file", "default", user, f"{folder}/ordinary.txt")
        if isinstance(asked, AskUser):
            user.remember(asked.offers[-1].scope, allowed=True)
    assert isinstance(ruling(project, "write_file", "default", user, "src/a.py"), Allowed)
    return user


@pytest.mark.parametrize("path", OUTSIDE, ids=ascii)
async def test_path_outside_the_session_folders_is_rejected_by_all_tools(project: Any, user: User, path: str) -> None:
    outside = project.folder.parent / "outside"
    for mode in ("default", "acceptEdits", "plan", "bypassPermissions"):
        for name in ("write_file", "edit_file", "read_file", "grep", "glob", "list_dir"):
            assert isinstance(ruling(project, name, mode, user, path), Denied), (mode, name)
    await project.failure("write_file", path=path, content="owned")
    assert [file.name for file in outside.iterdir()] == ["secret.txt"]
    assert (outside / "secret.txt").read_text() == "secret"


@pytest.mark.parametrize("path", RUN_LATER)
def test_file_whose_contents_run_later_is_written_only_if_the_user_allows_it(
    project: Any, user: User, path: str
) -> None:
    for mode in ("default", "acceptEdits"):
        for name in ("write_file", "edit_file"):
            asked = ruling(project, name, mode, user, path)
            assert isinstance(asked, AskUser), (mode, name)
            (offer,) = asked.offers
            assert not offer.saved
    user.remember(offer.scope, allowed=True)
    assert isinstance(ruling(project, "write_file", "default", user, path), Allowed)
    allowed = [
        other for other in RUN_LATER if isinstance(ruling(project, "write_file", "default", user, other), Allowed)
    ]
    resolve = project.context.boundary.resolve
    assert {resolve(other).path for other in allowed} == {resolve(path).path}


@pytest.mark.parametrize("path", [*SECRETS, "agent/config.toml", ".ssh/config"])
def test_file_with_secrets_is_read_or_written_only_if_the_user_allows_it(project: Any, user: User, path: str) -> None:
    for mode in ("default", "acceptEdits"):
        for name in ("read_file", "grep", "write_file", "edit_file"):
            assert isinstance(ruling(project, name, mode, user, path), AskUser), (mode, name)


def test_existing_makefile_is_edited_without_a_question_in_mode_accept_edits(project: Any, user: User) -> None:
    (project.folder / "Makefile").write_text("all:\n")
    assert isinstance(ruling(project, "edit_file", "acceptEdits", user, "Makefile"), Allowed)
    assert Path(project.folder / "Makefile").read_text() == "all:\n"
