"""Saved preferences and permanent permissions of a project."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from helexa.acp.preferences import MAX_GRANTS, Grant, Preferences, Project


def test_choices_of_model_and_mode_are_saved_per_project_folder(tmp_path: Path):
    preferences = Preferences(tmp_path)
    preferences.change("/w", lambda project: msgspec.structs.replace(project, model="e:m", mode="plan"))

    assert Preferences(tmp_path).read("/w") == Project("/w", "e:m", "plan")
    assert Preferences(tmp_path).read("/other") == Project("/other")


def test_saved_permission_replaces_an_equal_one_and_their_number_is_limited(tmp_path: Path):
    preferences = Preferences(tmp_path)
    preferences.grant("/w", Grant("bash", "ls *", False))
    preferences.grant("/w", Grant("bash", "ls *", True))
    assert preferences.read("/w").grants == (Grant("bash", "ls *", True),)

    grants = tuple(Grant("bash", str(number), True) for number in range(MAX_GRANTS))
    preferences.change("/w", lambda project: msgspec.structs.replace(project, grants=grants))
    project = preferences.grant("/w", Grant("bash", "new", True))
    assert len(project.grants) == MAX_GRANTS
    assert project.grants[-1] == Grant("bash", "new", True)
    assert preferences.revoke("/w", Grant("bash", "new", True)).grants == grants[1:]


def test_concurrent_changes_of_preferences_are_all_saved(tmp_path: Path):
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: Preferences(tmp_path).grant("/w", Grant("bash", str(n), True)), range(40)))

    assert {grant.subject for grant in Preferences(tmp_path).read("/w").grants} == {str(n) for n in range(40)}


def test_damaged_preferences_file_or_unwritable_folder_raises_no_error(tmp_path: Path):
    preferences = Preferences(tmp_path)
    preferences.change("/w", lambda project: msgspec.structs.replace(project, model="e:m"))
    preferences.path("/w").write_bytes(b"{")
    assert preferences.read("/w") == Project("/w")

    (tmp_path / "file").write_text("")
    changed = Preferences(tmp_path / "file").grant("/w", Grant("bash", "x", True))
    assert changed.grants == (Grant("bash", "x", True),)
