"""The table of tool calls and reasoning in `docs/models.md` is what the code does."""

from pathlib import Path

from neuron.parsers.conformance import table

DOCS = Path(__file__).parents[4] / "docs" / "models.md"


def test_documented_table_of_tool_call_conformance_matches_the_code(templates: dict[str, str]):
    measured = table(templates)
    assert " no " not in measured.replace("| `harmony` | yes | yes | no |", ""), measured
    assert measured in DOCS.read_text(encoding="utf-8"), f"the table in docs/models.md is not:\n{measured}"
