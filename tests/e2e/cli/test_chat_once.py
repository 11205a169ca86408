"""`helexa chat` with a prompt or piped text: the completion on stdout, everything else on stderr."""

import select
import signal
import subprocess
import sys

import pytest

NOT_FOUND = {"error": {"message": "model 'nope' not found", "type": "invalid_request_error", "code": "model_not_found"}}
BUSY = {"error": {"message": "all slots\nare taken", "type": "rate_limit_error", "code": "rate_limit_exceeded"}}


@pytest.fixture
def chat(helexa, gateway):
    return lambda *arguments, **options: helexa("chat", *arguments, "--url", gateway.url, **options)


def test_chat_writes_only_the_completion_to_stdout(chat, gateway):
    result = chat("hello?")
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello there!\n", "")
    request = gateway.requests[0]
    assert request["messages"] == [{"role": "user", "content": "hello?"}]
    assert request["stream"] is True


def test_first_loaded_model_of_the_gateway_is_the_default(chat, gateway):
    chat("hello?")
    assert gateway.requests[0]["model"] == "warm/model"


def test_chat_uses_an_unloaded_model_with_a_note_if_no_model_is_loaded(chat, gateway):
    gateway.models = [{"id": "cold/model", "loaded": False}]
    result = chat("hello?")
    assert gateway.requests[0]["model"] == "cold/model"
    assert result.stdout == "Hello there!\n"
    assert "cold/model is not loaded yet" in result.stderr


def test_gateway_without_models_ends_the_command_with_an_error(chat, gateway):
    gateway.models = []
    result = chat("hello?")
    assert (result.returncode, result.stdout) == (4, "")
    assert "has no models" in result.stderr


def test_options_of_the_command_line_are_sent_in_the_request(chat, gateway):
    chat("hi", "-m", "org/m", "--system", "Be brief.", "--temperature", "0", "--seed", "7", "--max-tokens", "5")
    request = gateway.requests[0]
    assert request["model"] == "org/m"
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (request["temperature"], request["seed"], request["max_tokens"]) == (0, 7, 5)


def test_request_contains_no_options_that_the_command_line_omits(chat, gateway):
    chat("hi")
    assert set(gateway.requests[0]) == {"model", "messages", "seed", "stream", "stream_options"}


@pytest.mark.parametrize(
    ("arguments", "stdin", "prompt"),
    [
        ([], "  indented\n\n", "  indented"),
        (["summarize"], "a text\n", "summarize\n\na text"),
        (["naïve 漢字"], "", "naïve 漢字"),
    ],
)
def test_text_piped_to_stdin_is_appended_to_the_prompt(chat, gateway, arguments, stdin, prompt):
    assert chat(*arguments, stdin=stdin).returncode == 0
    assert gateway.requests[0]["messages"][-1]["content"] == prompt


def test_chat_notes_that_it_waits_for_stdin_to_end_before_it_sends_the_request(environ, gateway):
    command = [sys.executable, "-m", "helexa", "chat", "hi", "--url", gateway.url]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, env=environ, text=True, **pipes) as process:
        assert select.select([process.stderr], [], [], 60)[0]
        assert "waiting for stdin to end" in process.stderr.readline()
        assert gateway.requests == []
        assert process.communicate("there", timeout=60) == ("Hello there!\n", "")
    assert gateway.requests[0]["messages"] == [{"role": "user", "content": "hi\n\nthere"}]


def test_empty_prompt_is_a_usage_error(chat, gateway):
    result = chat(stdin="\n")
    assert (result.returncode, result.stdout) == (2, "")
    assert gateway.requests == []


def test_url_and_api_key_of_the_gateway_are_read_from_environment_variables(helexa, gateway):
    result = helexa("chat", "hi", HELEXA_BASE_URL=f"{gateway.url}/v1/", HELEXA_API_KEY="sesame")
    assert result.stdout == "Hello there!\n"
    assert gateway.authorization == "Bearer sesame"


def test_without_a_key_no_authorization_header_is_sent(chat, gateway):
    chat("hi")
    assert gateway.authorization is None


def test_chat_prints_the_answer_without_the_reasoning(chat, gateway):
    gateway.chunks = [{"choices": [{"delta": {"reasoning_content": "hmm"}}]}, "42"]
    assert chat("hi").stdout == "42\n"


def test_control_characters_in_an_answer_are_not_printed(chat, gateway):
    gateway.chunks = ["a\x1b", "[31mred\x1b]0;title\x07", "\x9b2J\r\x00\x7f", "tab\tline\n"]
    assert chat("hi").stdout == "a[31mred]0;title2Jtab\tline\n"


def test_malformed_chunks_of_the_answer_stream_are_ignored(chat, gateway):
    strange = [{}, {"choices": None}, {"choices": [3]}, {"choices": [{"delta": {"content": 5}}], "usage": []}]
    gateway.chunks = [*strange, "fine"]
    assert chat("hi").stdout == "fine\n"


@pytest.mark.parametrize(
    ("status", "headers", "envelope", "code", "shown"),
    [
        (404, {}, NOT_FOUND, 4, "helexa: model 'nope' not found; the server has cold/model, warm/model\n"),
        (503, {"Retry-After": "0"}, BUSY, 1, "helexa: all slots are taken\n"),
        (500, {}, {"error": "plain \x1b[1mtext"}, 1, "helexa: plain [1mtext\n"),
        (502, {}, ["no envelope"], 1, "helexa: {url} answered HTTP 502\n"),
        (
            200,
            {},
            {"id": "not a stream"},
            1,
            "helexa: {url} did not return an event stream; check that the URL is that of a helexa server\n",
        ),
    ],
)
def test_error_response_of_the_gateway_is_printed_as_one_line(chat, gateway, status, headers, envelope, code, shown):
    gateway.error_response = (status, headers, envelope)
    result = chat("hi", "-m", "nope")
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr == shown.replace("{url}", gateway.url)


def test_error_event_in_the_stream_ends_the_command_with_an_error(chat, gateway):
    gateway.chunks = ["half", {"error": {"message": "the engine died", "type": "api_error", "code": None}}]
    result = chat("hi")
    assert (result.returncode, result.stdout) == (1, "half\n")
    assert result.stderr == "helexa: the engine died\n"


def test_broken_connection_ends_the_command_with_an_error(chat, gateway):
    gateway.chunks = ["half", "DROP"]
    result = chat("hi")
    assert (result.returncode, result.stdout) == (3, "half\n")
    assert result.stderr.startswith("helexa: the ")


def test_ctrl_c_closes_the_connection_to_the_gateway(environ, gateway):
    gateway.chunks = ["begun", "WAIT"]
    command = [sys.executable, "-m", "helexa", "chat", "hi", "--url", gateway.url]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environ, text=True, **pipes) as process:
        assert process.stdout.read(5) == "begun"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert gateway.client_disconnected.wait(60)
        assert process.stderr.read() == ""
