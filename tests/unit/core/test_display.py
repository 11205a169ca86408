"""Plain-text tables, as commands print them to a pipe."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.core.display import printable, text_table

TABLE = """\
MODEL    SIZE  LOAD  STATE
org/a  4.1 GB   2.2  [red]good :smile:
日本    12 kB     -"""


@pytest.mark.parametrize(("name", "value"), [("COLUMNS", "10"), ("FORCE_COLOR", "1"), ("TERM", "dumb")])
def test_text_table_ignores_terminal_environment_variables(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    rows = [("org/a", "4.1 GB", 2.25, "[red]good :smile:"), ("日本", "12 kB", None, "")]
    assert text_table(("MODEL", "SIZE", "LOAD", "STATE"), rows, right=("SIZE",)) == TABLE


def test_text_table_keeps_long_cells_on_one_line() -> None:
    long = "word " * 2000
    assert text_table(("A", "B"), [(long, 1)]).splitlines()[1] == f"{long.strip()}  1"


def test_text_table_without_rows_has_only_its_headings() -> None:
    assert text_table(("A", "B"), []) == "A  B"


@given(st.text())
def test_control_characters_are_escaped_for_display(text: str) -> None:
    assert printable(text).isprintable()
    assert text_table(("A", "B"), [(text, 1)]).count("\n") == 1
