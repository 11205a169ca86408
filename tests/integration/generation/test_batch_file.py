"""Files of prompts and results: their format, and resumed runs that neither lose nor repeat finished prompts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import helexa
from helexa.generation.batch_file import ResultFile

RUN = """
import sys, helexa
prompts, results, url = sys.argv[1:]
print("ready", flush=True)
print(helexa.batch_file(prompts, results, target=url, model="m", max_parallel=2,
                        on_result=lambda index, result: print(index, flush=True)), flush=True)
"""


@pytest.fixture
def prompts(tmp_path):
    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        return path

    return write


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results.jsonl"


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_form_of_a_prompt_line_yields_a_result_line(scripted, prompts, results):
    target, model = scripted
    path = prompts(
        '"late one"',
        {"prompt": "two", "id": "b", "max_tokens": 3, "label": "ignored"},
        "",
        [{"role": "user", "content": "three"}],
        {"messages": [{"role": "user", "content": "four"}], "system": "Be brief.", "seed": 9},
        {"id": 5},
        "no json",
    )
    indices = []
    summary = model.batch_file(path, results, seed=100, on_result=lambda index, result: indices.append(index))
    assert summary == helexa.FileSummary(finished=4, failed=2, kept=0)
    lines = records(results)
    assert [record["index"] for record in lines] == [0, 1, 2, 3, 4, 5]
    assert sorted(indices) == [0, 1, 2, 3, 4, 5] != indices
    assert [record.get("text") for record in lines] == ["late one", "two", "three", "four", None, None]
    assert [record.get("id") for record in lines] == [None, "b", None, None, 5, None]
    assert lines[4]["error"]["type"] == "InvalidRequestError"
    assert "line 6: an object needs a 'prompt'" in lines[4]["error"]["message"]
    assert [record.get("seed") for record in lines[:4]] == [100, 101, 102, 12]
    bodies = {request.messages[-1]["content"]: request.body("m") for request in target.requests}
    assert bodies["two"]["max_tokens"] == 3
    assert "max_tokens" not in bodies["three"]
    assert bodies["four"]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_second_run_with_the_same_files_sends_only_unfinished_prompts(scripted, prompts, results):
    target, model = scripted
    path = prompts('"one"', '"bad"', '"three"')
    assert model.batch_file(path, results) == helexa.FileSummary(finished=2, failed=1, kept=0)
    with path.open("a") as file:
        file.write('"four"\n')
    target.requests.clear()
    assert model.batch_file(path, results) == helexa.FileSummary(finished=1, failed=1, kept=2)
    assert sorted(request.messages[-1]["content"] for request in target.requests) == ["bad", "four"]
    assert [record["index"] for record in records(results)] == [0, 1, 2, 3]


def test_prompt_whose_result_line_is_truncated_is_sent_again(scripted, prompts, results):
    _, model = scripted
    path = prompts('"one"', '"two"', '"three"')
    model.batch_file(path, results)
    content = results.read_bytes()
    results.write_bytes(content[: content.rindex(b'"text"')])
    assert model.batch_file(path, results) == helexa.FileSummary(finished=1, failed=0, kept=2)
    assert [record["text"] for record in records(results)] == ["one", "two", "three"]


def test_results_file_of_other_prompts_or_options_is_not_overwritten(scripted, prompts, results):
    _, model = scripted
    model.batch_file(prompts('"one"', '"two"'), results)
    content = results.read_bytes()
    for second, options in (('"other"', {}), ('"two"', {"temperature": 0.5})):
        with pytest.raises(helexa.InvalidRequestError, match="name another file"):
            model.batch_file(prompts('"one"', second), results, **options)
    assert results.read_bytes() == content


def test_existing_file_with_other_contents_is_not_overwritten_by_results(scripted, prompts, results):
    results.write_text("my diary\n")
    with pytest.raises(helexa.InvalidRequestError, match="other data than results"):
        scripted[1].batch_file(prompts('"one"'), results)
    assert results.read_text() == "my diary\n"


def test_run_fails_if_another_process_has_locked_the_results_file(scripted, prompts, results):
    with ResultFile(results), pytest.raises(helexa.InvalidRequestError, match="another process"):
        scripted[1].batch_file(prompts('"one"'), results)


def test_missing_prompts_file_creates_no_results(scripted, results):
    with pytest.raises(FileNotFoundError):
        scripted[1].batch_file("nowhere.jsonl", results)
    assert not results.exists()


def test_prompts_file_is_not_read_completely_before_the_first_result(scripted, prompts, results):
    """A run reads at most 50 of 200 prompts before the first result."""
    target, model = scripted
    path = prompts(*(json.dumps(f"p{number}") for number in range(200)))
    read = []
    target.on_request = read.append

    def on_result(index, result):
        if index == 0:
            assert len(read) < 50

    assert model.batch_file(path, results, on_result=on_result).finished == 200


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_run_after_a_killed_process_resumes_its_results_file(gateway, prompts, results, number):
    path = prompts(*(json.dumps(f"prompt {index}") for index in range(6)))
    gateway.response_limit = 2
    command = [sys.executable, "-c", RUN, str(path), str(results), gateway.url]
    environ = {**os.environ, "PYTHONWARNINGS": "error"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        finished = {int(process.stdout.readline()) for _ in range(2)}
        process.send_signal(number)
        assert process.wait(60) != 0
        process.communicate()
    assert {record["index"] for record in records(results)} == finished
    gateway.response_limit = None
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "FileSummary(finished=4, failed=0, kept=2)"
    assert [record["index"] for record in records(results)] == list(range(6))
    sent = [request["messages"][0]["content"] for request in gateway.requests]
    assert all(sent.count(f"prompt {index}") == 1 for index in finished)
    assert not [entry for entry in Path(results.parent).iterdir() if entry.name.startswith(".")]
