"""Files of prompts and of results: what they say, and that nothing finished is lost or done twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import helexa
from helexa.generation.files.result_file import ResultFile

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


def test_every_form_of_a_prompt_and_what_is_said_of_its_result(scripted, prompts, results):
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
    told = []
    summary = model.batch_file(path, results, seed=100, on_result=lambda index, result: told.append(index))
    assert summary == helexa.FileSummary(finished=4, failed=2, kept=0)
    found = records(results)
    assert [record["index"] for record in found] == [0, 1, 2, 3, 4, 5]
    assert sorted(told) == [0, 1, 2, 3, 4, 5] != told
    assert [record.get("text") for record in found] == ["late one", "two", "three", "four", None, None]
    assert [record.get("id") for record in found] == [None, "b", None, None, 5, None]
    assert found[4]["error"]["type"] == "InvalidRequestError"
    assert "line 6: an object needs a 'prompt'" in found[4]["error"]["message"]
    assert [record.get("seed") for record in found[:4]] == [100, 101, 102, 12]
    bodies = {request.messages[-1]["content"]: request.body("m") for request in target.requests}
    assert bodies["two"]["max_tokens"] == 3
    assert "max_tokens" not in bodies["three"]
    assert bodies["four"]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_a_second_run_asks_only_what_has_no_answer(scripted, prompts, results):
    target, model = scripted
    path = prompts('"one"', '"bad"', '"three"')
    assert model.batch_file(path, results) == helexa.FileSummary(finished=2, failed=1, kept=0)
    with path.open("a") as file:
        file.write('"four"\n')
    target.requests.clear()
    assert model.batch_file(path, results) == helexa.FileSummary(finished=1, failed=1, kept=2)
    assert sorted(request.messages[-1]["content"] for request in target.requests) == ["bad", "four"]
    assert [record["index"] for record in records(results)] == [0, 1, 2, 3]


def test_a_line_that_was_cut_off_is_done_again(scripted, prompts, results):
    _, model = scripted
    path = prompts('"one"', '"two"', '"three"')
    model.batch_file(path, results)
    whole = results.read_bytes()
    results.write_bytes(whole[: whole.rindex(b'"text"')])
    assert model.batch_file(path, results) == helexa.FileSummary(finished=1, failed=0, kept=2)
    assert [record["text"] for record in records(results)] == ["one", "two", "three"]


def test_answers_to_other_prompts_are_left_alone(scripted, prompts, results):
    _, model = scripted
    model.batch_file(prompts('"one"', '"two"'), results)
    before = results.read_bytes()
    for second, options in (('"other"', {}), ('"two"', {"temperature": 0.5})):
        with pytest.raises(helexa.InvalidRequestError, match="name another file"):
            model.batch_file(prompts('"one"', second), results, **options)
    assert results.read_bytes() == before


def test_a_file_of_something_else_is_left_alone(scripted, prompts, results):
    results.write_text("my diary\n")
    with pytest.raises(helexa.InvalidRequestError, match="something else"):
        scripted[1].batch_file(prompts('"one"'), results)
    assert results.read_text() == "my diary\n"


def test_two_runs_do_not_write_to_one_file(scripted, prompts, results):
    with ResultFile(results), pytest.raises(helexa.InvalidRequestError, match="another process"):
        scripted[1].batch_file(prompts('"one"'), results)


def test_prompts_that_are_not_there(scripted, results):
    with pytest.raises(FileNotFoundError):
        scripted[1].batch_file("nowhere.jsonl", results)
    assert not results.exists()


def test_prompts_are_read_as_they_are_drawn(scripted, prompts, results):
    """Not all of them are held at once: what stands further down may still be changed."""
    target, model = scripted
    path = prompts(*(json.dumps(f"p{number}") for number in range(200)))
    drawn = []
    target.before = drawn.append

    def on_result(index, result):
        if index == 0:
            assert len(drawn) < 50

    assert model.batch_file(path, results, on_result=on_result).finished == 200


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_was_finished_outlives_the_process_and_the_next_one_goes_on(gateway, prompts, results, number):
    path = prompts(*(json.dumps(f"prompt {index}") for index in range(6)))
    gateway.response_limit = 2
    command = [sys.executable, "-c", RUN, str(path), str(results), gateway.url]
    environ = {**os.environ, "PYTHONWARNINGS": "error"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        finished = {int(process.stdout.readline()) for _ in range(2)}
        process.send_signal(number)
        assert process.wait(30) != 0
        process.communicate()
    assert {record["index"] for record in records(results)} == finished
    gateway.response_limit = None
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "FileSummary(finished=4, failed=0, kept=2)"
    assert [record["index"] for record in records(results)] == list(range(6))
    asked = [request["messages"][0]["content"] for request in gateway.requests]
    assert all(asked.count(f"prompt {index}") == 1 for index in finished)
    assert not [entry for entry in Path(results.parent).iterdir() if entry.name.startswith(".")]
