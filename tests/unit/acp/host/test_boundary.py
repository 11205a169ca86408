"""Paths are resolved and limited to the session's folders."""

import os
from pathlib import Path

import pytest

from helexa.acp.tools.boundary_and_secrets import Boundary, OutOfBounds


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a project, a sibling folder, and symbolic links between both; return the parent folder."""
    (tmp_path / "project/src").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.txt").write_text("secret")
    (tmp_path / "project/way-out").symlink_to("../outside")
    (tmp_path / "project/secret-link").symlink_to(tmp_path / "outside/secret.txt")
    (tmp_path / "project/src/way-up").symlink_to("..")
    (tmp_path / "project/loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "../outside/secret.txt",
        "src/../../outside/secret.txt",
        "/etc/passwd",
        "way-out/secret.txt",
        "way-out/new-file.txt",
        "secret-link",
        "src/way-up/way-out/secret.txt",
        "~/.ssh/id_rsa",
        "$HOME/.ssh/id_rsa",
        "src/way-up/../outside/x",
        "..",
        "/",
        "a\0b",
        "half \ud83d a character",
        "/proc/self/cwd/../x",
    ],
)
def test_path_outside_the_session_folders_is_rejected(tree: Path, path: str) -> None:
    with pytest.raises(OutOfBounds):
        Boundary(tree / "project").resolve(path)


def test_unusual_paths_inside_the_session_folders_are_accepted(tree: Path) -> None:
    boundary = Boundary(tree / "project")
    assert boundary.resolve("src/../src/a.py").path == tree / "project/src/a.py"
    assert boundary.resolve("src/way-up/src/a.py").path == tree / "project/src/a.py"
    assert boundary.resolve(str(tree / "outside/../project/a.py")).path == tree / "project/a.py"
    assert boundary.resolve("..a/b").path == tree / "project/..a/b"
    assert boundary.resolve(".").path == tree / "project"


def test_folder_whose_name_begins_with_the_project_name_is_outside(tree: Path) -> None:
    (tree / "project-2").mkdir()
    with pytest.raises(OutOfBounds, match="project-2"):
        Boundary(tree / "project").resolve(str(tree / "project-2/a"))


def test_additional_folders_of_a_session_are_accessible(tree: Path) -> None:
    boundary = Boundary(tree / "project", [tree / "outside"])
    assert boundary.resolve("way-out/secret.txt").path == tree / "outside/secret.txt"
    assert boundary.folders == [tree / "project", tree / "outside"]


def test_resolved_path_keeps_symbolic_links_of_the_clients_path(tree: Path) -> None:
    (tree / "spelt").symlink_to("project")
    resolved = Boundary(tree / "spelt").resolve("src/way-up/src/a.py")
    assert resolved.path == tree / "spelt/src/a.py"
    assert resolved.real == Path(os.path.realpath(tree)) / "project/src/a.py"


def test_path_counts_as_a_plan_file_only_if_its_real_path_is_in_the_plans_folder(tree: Path) -> None:
    plans = tree / "plans"
    plans.mkdir()
    boundary = Boundary(tree / "project", plans=plans)
    assert boundary.resolve(str(plans / "plan.md")).plans
    assert not boundary.resolve(str(plans / "../project/plan.md")).plans
    (plans / "link").symlink_to(tree / "project/src")
    assert not boundary.resolve(str(plans / "link/a.py")).plans
    with pytest.raises(OutOfBounds):
        boundary.resolve(str(plans / "../outside/x"))


def test_path_with_a_tilde_resolves_if_the_home_folder_is_the_project(
    monkeypatch: pytest.MonkeyPatch, tree: Path
) -> None:
    monkeypatch.setenv("HOME", str(tree / "project"))
    boundary = Boundary(tree / "project")
    for spelling in ("~/src/a", "$HOME/src/a", "${HOME}/src/a"):
        assert boundary.resolve(spelling).path == tree / "project/src/a"
    assert boundary.resolve("~").path == tree / "project"
    assert boundary.resolve("~a").path == tree / "project/~a"


@pytest.mark.parametrize(
    "path",
    [
        *(".envrc", "sub/.envrc", ".VSCode/tasks.json", ".zed/tasks.json", ".idea/workspace.xml", ".husky/pre-commit"),
        *(".githooks/pre-commit", ".mcp.json", ".cursor/mcp.json", ".claude/settings.json", ".gitmodules"),
        *(".gitattributes", ".gitconfig", ".devcontainer/devcontainer.json", ".bashrc", ".zshenv", ".profile"),
        *(".ssh/authorized_keys", ".github/workflows/ci.yml", ".github/actions/a/action.yml", ".gitlab-ci.yml"),
        *(".pre-commit-config.yaml", ".npmrc", "sitecustomize.py", "a.pth", "a.code-workspace", ".vimrc"),
        *(".config/helexa-acp/config.toml", ".local/share/helexa-acp/preferences.json", ".config/fish/config.fish"),
    ],
)
def test_writing_a_file_that_is_executed_later_needs_permission(tree: Path, path: str) -> None:
    assert Boundary(tree).resolve(path).guarded


@pytest.mark.parametrize(
    "path", ["a.py", "src/login", ".gitignore", ".github/README.md", "deploy/systemd/a.service", "profile", "fish/a.py"]
)
def test_writing_an_ordinary_file_needs_no_special_permission(tree: Path, path: str) -> None:
    assert not Boundary(tree).resolve(path).guarded


def test_files_in_a_git_folder_need_permission_to_be_written(tree: Path) -> None:
    boundary = Boundary(tree / "project")
    assert boundary.resolve(".git/hooks/pre-commit").guarded
    assert boundary.resolve("vendor/x/.git/config").guarded
    assert not boundary.resolve(".gitignore").guarded
