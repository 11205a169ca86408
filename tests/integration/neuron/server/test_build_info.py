"""The version and commit in `GET /version`."""

import subprocess
from pathlib import Path

import pytest

from helexa.core import version
from helexa.neuron.hardware.machine_description import build_facts


def clear() -> None:
    build_facts.cache_clear()
    version.build_identity.cache_clear()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HELEXA_BUILD_SHA", raising=False)
    clear()
    yield
    clear()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "pyproject.toml").touch()
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    for arguments in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "first")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)
    monkeypatch.setattr(version, "_ROOT", tmp_path)
    return tmp_path


def test_build_info_of_a_checkout_has_its_commit_and_whether_files_changed(checkout: Path) -> None:
    facts = build_facts()
    assert len(facts["git_sha_long"]) == 40
    assert facts["git_sha_long"].startswith(facts["git_sha"])
    assert (len(facts["git_sha"]), facts["git_dirty"]) == (7, False)
    (checkout / "pyproject.toml").write_text("x = 1")
    clear()
    assert build_facts()["git_dirty"] is True


def test_commit_comes_from_the_build_variable_if_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "_ROOT", tmp_path)
    assert build_facts()["git_sha"] == "unknown"
    monkeypatch.setenv("HELEXA_BUILD_SHA", "0123456789abcdef0123456789abcdef01234567")
    clear()
    facts = build_facts()
    assert (facts["git_sha"], facts["git_sha_long"][7:10], facts["git_dirty"]) == ("0123456", "789", None)


def test_build_info_contains_the_versions_of_python_and_torch() -> None:
    facts = build_facts()
    assert facts["torch_version"]
    assert facts["torch_cuda"] is None or facts["torch_cuda"][0].isdigit()
    assert facts["python_version"].startswith("3.")
