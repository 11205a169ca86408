"""No spelling of a path leads out of a session's folders."""

import os
from pathlib import Path

import pytest

from helexa.acp.host.boundary import Boundary, OutOfBounds


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project, a folder beside it, and links that lead from the one to the other."""
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
def test_what_leads_out_is_refused(tree: Path, path: str) -> None:
    with pytest.raises(OutOfBounds):
        Boundary(tree / "project").place(path)


def test_what_only_looks_as_if_is_not(tree: Path) -> None:
    boundary = Boundary(tree / "project")
    assert boundary.place("src/../src/a.py").path == tree / "project/src/a.py"
    assert boundary.place("src/way-up/src/a.py").path == tree / "project/src/a.py"
    assert boundary.place(str(tree / "outside/../project/a.py")).path == tree / "project/a.py"
    assert boundary.place("..a/b").path == tree / "project/..a/b"
    assert boundary.place(".").path == tree / "project"


def test_a_folder_that_begins_alike_is_another(tree: Path) -> None:
    (tree / "project-2").mkdir()
    with pytest.raises(OutOfBounds, match="project-2"):
        Boundary(tree / "project").place(str(tree / "project-2/a"))


def test_additional_folders_belong_to_it(tree: Path) -> None:
    boundary = Boundary(tree / "project", [tree / "outside"])
    assert boundary.place("way-out/secret.txt").path == tree / "outside/secret.txt"
    assert boundary.folders == [tree / "project", tree / "outside"]


def test_a_client_hears_of_its_files_as_it_spells_them(tree: Path) -> None:
    (tree / "spelt").symlink_to("project")
    place = Boundary(tree / "spelt").place("src/way-up/src/a.py")
    assert place.path == tree / "spelt/src/a.py"
    assert place.real == Path(os.path.realpath(tree)) / "project/src/a.py"


def test_plans_are_told_apart_by_where_they_really_are(tree: Path) -> None:
    plans = tree / "plans"
    plans.mkdir()
    boundary = Boundary(tree / "project", plans=plans)
    assert boundary.place(str(plans / "plan.md")).plans
    assert not boundary.place(str(plans / "../project/plan.md")).plans
    (plans / "link").symlink_to(tree / "project/src")
    assert not boundary.place(str(plans / "link/a.py")).plans
    with pytest.raises(OutOfBounds):
        boundary.place(str(plans / "../outside/x"))


def test_the_home_may_be_the_project(monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    monkeypatch.setenv("HOME", str(tree / "project"))
    boundary = Boundary(tree / "project")
    for spelling in ("~/src/a", "$HOME/src/a", "${HOME}/src/a"):
        assert boundary.place(spelling).path == tree / "project/src/a"
    assert boundary.place("~").path == tree / "project"
    assert boundary.place("~a").path == tree / "project/~a"


def test_what_git_would_run_is_guarded(tree: Path) -> None:
    boundary = Boundary(tree / "project")
    assert boundary.place(".git/hooks/pre-commit").guarded
    assert boundary.place("vendor/x/.git/config").guarded
    assert not boundary.place(".gitignore").guarded
