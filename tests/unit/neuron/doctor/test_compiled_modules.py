"""Tests of the check for compiled modules."""

import py_compile
import sys
from pathlib import Path

import pytest

from helexa.neuron.doctor_machine import look_at_compiled_modules

PACKAGE = "package_of_the_compiled_modules_test"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The source file of a package that has never been imported."""
    source = tmp_path / PACKAGE / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return source


def test_doctor_notes_a_package_without_compiled_python_modules(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    [result] = look_at_compiled_modules(PACKAGE)
    assert result.level == "note"
    assert result.text.endswith(f" run {sys.executable} -m compileall -q {source.parent}")


def test_doctor_names_the_variable_that_disables_compiled_python_modules(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    [result] = look_at_compiled_modules(PACKAGE)
    assert result.text.endswith("unset PYTHONDONTWRITEBYTECODE")


def test_doctor_notes_nothing_about_packages_that_are_compiled_or_not_installed(source: Path) -> None:
    py_compile.compile(str(source))
    assert list(look_at_compiled_modules(PACKAGE)) == []
    assert list(look_at_compiled_modules("a_package_that_is_not_installed")) == []
