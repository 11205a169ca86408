"""`helexa generate` and `helexa run`: prompts from everywhere, answers as text and as JSON."""

import io
import json

import pytest

from helexa.cli import main

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture
def environ(environ, gateway):
    return environ | {"HELEXA_BASE_URL": gateway.url}


def contents(gateway):
    return [request["messages"][-1]["content"] for request in gateway.requests]


@pytest.mark.parametrize(
    ("arguments", "stdin", "model", "asked"),
    [
        (["generate", "hi"], "", "warm/model", "hi"),
        (["generate", "cold/model", "hi"], "", "cold/model", "hi"),
        (["generate", "hi", "-m", "cold/model"], "a text\n", "cold/model", "hi\n\na text"),
        (["generate", "-"], "piped", "warm/model", "piped"),
        (["run", "cold/model", "hi"], "", "cold/model", "hi"),
        (["run", "cold/model"], "piped", "cold/model", "piped"),
    ],
)
def test_a_prompt_and_a_model_are_told_apart(helexa, gateway, arguments, stdin, model, asked):
    done = helexa(*arguments, stdin=stdin)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello there!\n", "")
    assert (gateway.requests[0]["model"], contents(gateway)) == (model, [asked])


def test_files_come_below_the_prompt(helexa, gateway, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"text {name}\n")
    done = helexa("generate", "compare", "-f", str(tmp_path / "a"), "--file", str(tmp_path / "b"), "--stats")
    assert contents(gateway) == ["compare\n\ntext a\n\ntext b"]
    assert done.stderr.startswith("prompt 12 tokens (8 from the cache), answer 3 tokens, first after")


def test_sampling_and_schema_travel(helexa, gateway, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    gateway.pieces = ['{"city": ', '"Rome"}']
    for schema in (json.dumps(SCHEMA), str(tmp_path / "schema.json")):
        done = helexa("generate", "hi", "--schema", schema, "--top-k", "3", "--stop", "a", "--stop", "b", "--no-think")
        assert done.stdout == '{"city": "Rome"}\n'
    for request in gateway.requests:
        assert (request["top_k"], request["stop"], request["enable_thinking"]) == (3, ["a", "b"], False)
        assert request["response_format"]["json_schema"]["schema"] == SCHEMA


def test_json(helexa, gateway):
    gateway.pieces = ["naïve\x9b"]
    done = helexa("generate", "hi", "--json", "--seed", "7")
    said = json.loads(done.stdout)
    assert (said["text"], said["seed"], said["model"]) == ("naïve\x9b", 7, "warm/model")
    assert said["usage"] == {"prompt": 12, "cached": 8, "completion": 3, "reasoning": 0}
    assert "naïve\\u009b" in done.stdout
    lines = helexa("generate", "hi", "-n", "3", "--jsonl", "--seed", "7").stdout.splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [7, 8, 9]


def test_several_answers_as_text_never_run_into_one_another(helexa, gateway):
    assert helexa("generate", "hi", "-n", "2").stdout == "Hello there!\n\nHello there!\n"


def test_a_file_of_prompts(helexa, gateway, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one"\n\n{"prompt": "two", "id": "b", "temperature": 0}\nthree\n{"messages": []}\n')
    done = helexa("generate", "--prompts", str(prompts), "--parallel", "2", "--stats")
    lines = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: line["index"])
    assert [line.get("text") for line in lines] == ["Hello there!", "Hello there!", None, None]
    assert lines[1]["id"] == "b"
    assert "line 4: invalid JSON or option" in lines[2]["error"]["message"]
    assert done.returncode == 1
    assert "2 answers in " in done.stderr
    assert done.stderr.endswith("prompts without an answer: 2; their lines say why\n")
    assert sorted(contents(gateway)) == ["one", "two"]


def test_prompts_that_are_piped_in_and_a_file_of_answers_that_is_gone_on_with(helexa, gateway, tmp_path):
    answers = tmp_path / "answers.jsonl"
    done = helexa("generate", "--prompts", "-", "--output", str(answers), stdin='"one"\n"two"\n')
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = helexa("generate", "--prompts", "-", "--output", str(answers), stdin='"one"\n"two"\n"three"\n')
    assert (done.returncode, done.stderr) == (0, "prompts answered before: 2\n")
    assert [json.loads(line)["index"] for line in answers.read_text().splitlines()] == [0, 1, 2]
    assert sorted(contents(gateway)) == ["one", "three", "two"]
    done = helexa("generate", "--prompts", "-", "-o", str(answers), "--system", "x", stdin='"one"\n')
    assert done.returncode == 2
    assert "belongs to another prompt" in done.stderr


def test_errors_in_piped_prompts_name_stdin(helexa, gateway, tmp_path):
    for arguments in ([], ["-o", str(tmp_path / "answers.jsonl")]):
        done = helexa("generate", "--prompts", "-", *arguments, stdin='"one"\nthree\n')
        text = done.stdout or (tmp_path / "answers.jsonl").read_text()
        (message,) = [line["error"]["message"] for line in map(json.loads, text.splitlines()) if "error" in line]
        assert message.startswith("stdin, line 2: invalid JSON or option")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["hi", "there", "-m", "x"], "the model is given twice"),
        (["hi", "--json", "--jsonl"], "two forms of the same"),
        (["hi", "--prompts", "x"], "--prompts has prompts of its own"),
        (["hi", "-o", "x"], "are for --prompts"),
        (["hi", "-n", "0"], "-n"),
        (["hi", "--schema", "nowhere.json"], "nowhere.json: No such file"),
        (["hi", "--schema", "{"], "--schema: is not JSON"),
        (["hi", "-f", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        ([], "nothing to ask"),
        (["hi", "--device", "cpu"], "device, dtype and quant cannot be set for the server"),
    ],
)
def test_wrong_usage_is_one_line_and_nothing_is_asked(gateway, monkeypatch, capsys, arguments, words):
    monkeypatch.setenv("HELEXA_BASE_URL", gateway.url)
    monkeypatch.setattr("sys.argv", ["helexa", "generate", *arguments])
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert gateway.requests == []


def test_where_the_model_runs_is_said_on_demand(helexa, gateway):
    assert helexa("generate", "hi", "-v").stderr == f"warm/model: {gateway.url}\n"


def test_a_cut_answer_is_noted_unless_it_is_to_be_quiet(helexa, gateway):
    gateway.finish_reason = "length"
    assert helexa("generate", "hi").stderr == "the answer stopped at the token limit\n"
    assert helexa("generate", "hi", "-q").stderr == ""
