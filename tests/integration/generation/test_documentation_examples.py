"""Run the code of README.md, docs/library.md and examples/ with a real model."""

import csv
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CODE_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def default_model(small, monkeypatch, tmp_path):
    """Make the loaded model the default model, and run in an empty directory."""
    monkeypatch.setenv("HELEXA_MODEL", small._location.model)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def example(monkeypatch, capsys):
    def run(name, *arguments, stdin=""):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def code_blocks(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    return [(text[: match.start()].count("\n") + 2, match[1]) for match in CODE_BLOCK.finditer(text)]


def run_block(document, line, source, names):
    exec(compile("\n" * (line - 1) + source, document, "exec"), names)


def test_code_blocks_of_the_library_documentation_run(capsys):
    names = {"__name__": "page"}
    for line, source in code_blocks("docs/library.md"):
        run_block("docs/library.md", line, source, names)
    output = capsys.readouterr().out
    assert "Paris" in output
    assert "FileSummary(finished=2, failed=0, kept=0)" in output
    assert "1 failed" in output


def test_python_example_of_the_readme_runs_and_prints_the_expected_answer(capsys):
    examples = [numbered_block for numbered_block in code_blocks("README.md") if "import helexa" in numbered_block[1]]
    assert len(examples) == 1
    assert len(examples[0][1].splitlines()) <= 5
    run_block("README.md", *examples[0], {"__name__": "page"})
    assert "Paris" in capsys.readouterr().out


def test_classify_csv_example_labels_each_row(example):
    rows = list(csv.DictReader(io.StringIO(example("classify_csv.py", ROOT / "examples" / "reviews.csv", "text"))))
    assert [row["id"] for row in rows] == ["1", "2", "3", "4"]
    assert {row["label"] for row in rows} <= {"positive", "negative"}
    assert not any(row["error"] for row in rows)


def test_summarize_example_prints_a_summary(example, tmp_path):
    text = "\n\n".join(
        f"Chapter {number}. The fox went to town {number} and bought {number} hats." for number in range(9)
    )
    (tmp_path / "book.txt").write_text(text)
    assert len(example("summarize.py", tmp_path / "book.txt", "--size", 320).split()) > 3


def test_extract_example_prints_one_object_per_person(example):
    output = example("extract.py", stdin="Ann Miller, 31, is a baker in York.\nBob Hill, 50, is a smith.\n")
    people = [json.loads(line) for line in output.splitlines()]
    assert [person.keys() for person in people] == [{"name", "age", "job"}] * 2
    assert "Ann" in people[0]["name"]


def test_vote_example_prints_the_most_frequent_choice_and_the_counts(example):
    output = example("vote.py", "What is 2 + 2?", "--choices", "3", "4", "5", "-n", "3", "--tokens", "20").splitlines()
    assert output[0] in ("3", "4", "5")
    assert sum(int(count) for count in re.findall(r": (\d)", output[1])) == 3
