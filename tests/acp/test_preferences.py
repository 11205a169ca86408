"""What is remembered of a project."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from helexa.acp.preferences import MOST_GRANTS, Grant, Preferences, Project


def test_choices_are_remembered_by_folder(tmp_path: Path):
    memory = Preferences(tmp_path)
    memory.change("/w", lambda project: msgspec.structs.replace(project, model="e:m", mode="plan"))

    assert Preferences(tmp_path).read("/w") == Project("/w", "e:m", "plan")
    assert Preferences(tmp_path).read("/other") == Project("/other")


def test_grants_replace_each_other_and_are_bounded(tmp_path: Path):
    memory = Preferences(tmp_path)
    memory.grant("/w", "bash", "ls *", allowed=False)
    memory.grant("/w", "bash", "ls *", allowed=True)
    assert memory.read("/w").grants == (Grant("bash", "ls *", True),)

    many = tuple(Grant("bash", str(number), True) for number in range(MOST_GRANTS))
    memory.change("/w", lambda project: msgspec.structs.replace(project, grants=many))
    project = memory.grant("/w", "bash", "new", allowed=True)
    assert len(project.grants) == MOST_GRANTS
    assert project.grants[-1] == Grant("bash", "new", True)


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path):
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: Preferences(tmp_path).grant("/w", "bash", str(n), allowed=True), range(40)))

    assert {grant.subject for grant in Preferences(tmp_path).read("/w").grants} == {str(n) for n in range(40)}


def test_a_damaged_file_is_forgotten_and_an_unwritable_folder_no_failure(tmp_path: Path):
    memory = Preferences(tmp_path)
    memory.change("/w", lambda project: msgspec.structs.replace(project, model="e:m"))
    memory.path("/w").write_bytes(b"{")
    assert memory.read("/w") == Project("/w")

    (tmp_path / "file").write_text("")
    changed = Preferences(tmp_path / "file").grant("/w", "bash", "x", allowed=True)
    assert changed.grants == (Grant("bash", "x", True),)
