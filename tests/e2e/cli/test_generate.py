"""`helexa generate` and `helexa run`: prompts from arguments, files and stdin; text and JSON output."""

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
    ("arguments", "stdin", "model", "prompt"),
    [
        (["generate", "hi"], "", "warm/model", "hi"),
        (["generate", "cold/model", "hi"], "", "cold/model", "hi"),
        (["generate", "hi", "-m", "cold/model"], "a text\n", "cold/model", "hi\n\na text"),
        (["generate", "-"], "piped", "warm/model", "piped"),
        (["run", "cold/model", "hi"], "", "cold/model", "hi"),
        (["run", "cold/model"], "piped", "cold/model", "piped"),
    ],
)
def test_first_argument_is_the_model_if_it_names_one_else_the_prompt(helexa, gateway, arguments, stdin, model, prompt):
    result = helexa(*arguments, stdin=stdin)
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello there!\n", "")
    assert (gateway.requests[0]["model"], contents(gateway)) == (model, [prompt])


def test_files_named_in_the_arguments_of_generate_are_appended_to_the_prompt(helexa, gateway, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"text {name}\n")
    result = helexa("generate", "compare", "-f", str(tmp_path / "a"), "--file", str(tmp_path / "b"), "--stats")
    assert contents(gateway) == ["compare\n\ntext a\n\ntext b"]
    assert result.stderr.startswith("prompt 12 tokens (8 from the cache), answer 3 tokens, first after")


def test_images_precede_the_prompt_in_the_request(helexa, gateway, tmp_path):
    (tmp_path / "a.png").write_bytes(b"GIF89a")
    url = "data:image/png;base64,iVBORw0KGgo="
    result = helexa("generate", "what is it?", "-i", str(tmp_path / "a.png"), "--image", url)
    assert (result.returncode, result.stdout) == (0, "Hello there!\n")
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in ("data:image/gif;base64,R0lGODlh", url)]
    assert contents(gateway) == [[*parts, {"type": "text", "text": "what is it?"}]]
    result = helexa("generate", "what is it?", "-i", str(tmp_path / "b.png"))
    assert (result.returncode, "b.png: No such file" in result.stderr) == (2, True)


def test_generate_sends_its_sampling_options_and_json_schema_to_the_gateway(helexa, gateway, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    gateway.chunks = ['{"city": ', '"Rome"}']
    for schema in (json.dumps(SCHEMA), str(tmp_path / "schema.json")):
        result = helexa(
            "generate", "hi", "--schema", schema, "--top-k", "3", "--stop", "a", "--stop", "b", "--no-think"
        )
        assert result.stdout == '{"city": "Rome"}\n'
    for request in gateway.requests:
        assert (request["top_k"], request["stop"], request["enable_thinking"]) == (3, ["a", "b"], False)
        assert request["response_format"]["json_schema"]["schema"] == SCHEMA


def test_option_json_prints_the_completion_with_its_seed_and_usage(helexa, gateway):
    gateway.chunks = ["naïve\x9b"]
    result = helexa("generate", "hi", "--json", "--seed", "7")
    output = json.loads(result.stdout)
    assert (output["text"], output["seed"], output["model"]) == ("naïve\x9b", 7, "warm/model")
    assert output["usage"] == {"prompt": 12, "cached": 8, "completion": 3, "reasoning": 0}
    assert "naïve\\u009b" in result.stdout
    lines = helexa("generate", "hi", "-n", "3", "--jsonl", "--seed", "7").stdout.splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [7, 8, 9]


def test_blank_line_separates_several_completions_on_stdout(helexa, gateway):
    assert helexa("generate", "hi", "-n", "2").stdout == "Hello there!\n\nHello there!\n"


def test_generate_prints_one_result_line_per_prompt_of_a_prompts_file(helexa, gateway, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one"\n\n{"prompt": "two", "id": "b", "temperature": 0}\nthree\n{"messages": []}\n')
    result = helexa("generate", "--prompts", str(prompts), "--parallel", "2", "--stats")
    lines = sorted((json.loads(line) for line in result.stdout.splitlines()), key=lambda line: line["index"])
    assert [line.get("text") for line in lines] == ["Hello there!", "Hello there!", None, None]
    assert lines[1]["id"] == "b"
    assert "line 4: invalid JSON or option" in lines[2]["error"]["message"]
    assert result.returncode == 1
    assert "2 answers in " in result.stderr
    assert result.stderr.endswith("failed prompts: 2; the errors are in their result lines\n")
    assert sorted(contents(gateway)) == ["one", "two"]


def test_generate_with_prompts_from_stdin_resumes_its_output_file(helexa, gateway, tmp_path):
    output = tmp_path / "answers.jsonl"
    result = helexa("generate", "--prompts", "-", "--output", str(output), stdin='"one"\n"two"\n')
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    result = helexa("generate", "--prompts", "-", "--output", str(output), stdin='"one"\n"two"\n"three"\n')
    assert (result.returncode, result.stderr) == (0, "prompts already answered: 2\n")
    assert [json.loads(line)["index"] for line in output.read_text().splitlines()] == [0, 1, 2]
    assert sorted(contents(gateway)) == ["one", "three", "two"]
    result = helexa("generate", "--prompts", "-", "-o", str(output), "--system", "x", stdin='"one"\n')
    assert result.returncode == 2
    assert "belongs to another prompt" in result.stderr


def test_error_for_an_invalid_line_of_piped_prompts_names_stdin_and_the_line(helexa, gateway, tmp_path):
    for arguments in ([], ["-o", str(tmp_path / "answers.jsonl")]):
        result = helexa("generate", "--prompts", "-", *arguments, stdin='"one"\nthree\n')
        text = result.stdout or (tmp_path / "answers.jsonl").read_text()
        (message,) = [line["error"]["message"] for line in map(json.loads, text.splitlines()) if "error" in line]
        assert message.startswith("stdin, line 2: invalid JSON or option")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "there", "-m", "x"], "the model is given twice"),
        (["hi", "--json", "--jsonl"], "exclude each other"),
        (["hi", "--prompts", "x"], "--prompts cannot be combined with a PROMPT"),
        (["hi", "-o", "x"], "need --prompts"),
        (["hi", "-n", "0"], "-n"),
        (["hi", "--schema", "nowhere.json"], "nowhere.json: No such file"),
        (["hi", "--schema", "{"], "--schema is not valid JSON"),
        (["hi", "-f", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--prompts", "/dev/null", "-o", "/nowhere/x"], "/nowhere/x: the folder /nowhere does not exist"),
        (["hi", "-i", "nowhere.png"], "nowhere.png: No such file"),
        ([], "nothing to ask"),
        (["hi", "--device", "cpu"], "device, dtype, quant and the context length cannot be set for the server"),
    ],
)
def test_usage_error_of_generate_is_one_line_and_sends_no_request(gateway, monkeypatch, capsys, arguments, message):
    monkeypatch.setenv("HELEXA_BASE_URL", gateway.url)
    monkeypatch.setattr("sys.argv", ["helexa", "generate", *arguments])
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert gateway.requests == []


@pytest.mark.parametrize("arguments", [["--prompts", "nowhere"], ["--prompts", "/dev/null", "-o", "/nowhere/x"]])
def test_generate_checks_input_and_output_files_before_downloading_a_model(monkeypatch, capsys, arguments):
    loaded = []
    monkeypatch.setattr("helexa.cli.commands.generate.load_model", lambda *_, **__: loaded.append(1))
    monkeypatch.setattr("sys.argv", ["helexa", "generate", "--private", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "nowhere" in capsys.readouterr().err
    assert not loaded


def test_generate_with_option_verbose_prints_where_the_model_runs(helexa, gateway):
    assert helexa("generate", "hi", "-v").stderr == f"warm/model: {gateway.url}\n"


def test_truncated_completion_is_noted_on_stderr_unless_quiet(helexa, gateway):
    gateway.finish_reason = "length"
    assert helexa("generate", "hi").stderr == "the answer stopped at the token limit\n"
    assert helexa("generate", "hi", "-q").stderr == ""
