"""`helexa chat` with a prompt or piped text: one answer on stdout, everything else on stderr."""

import signal
import subprocess
import sys

import pytest

NOT_FOUND = {"error": {"message": "model 'nope' not found", "type": "invalid_request_error", "code": "model_not_found"}}
BUSY = {"error": {"message": "all seats\nare taken", "type": "rate_limit_error", "code": "rate_limit_exceeded"}}


@pytest.fixture
def chat(helexa, gateway):
    return lambda *arguments, **more: helexa("chat", *arguments, "--url", gateway.url, **more)


def test_the_answer_alone_is_on_stdout(chat, gateway):
    done = chat("hello?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello there!\n", "")
    request = gateway.requests[0]
    assert request["messages"] == [{"role": "user", "content": "hello?"}]
    assert request["stream"] is True


def test_the_first_loaded_model_is_asked(chat, gateway):
    chat("hello?")
    assert gateway.requests[0]["model"] == "warm/model"


def test_a_cold_model_is_asked_when_none_is_loaded(chat, gateway):
    gateway.models = [{"id": "cold/model", "loaded": False}]
    done = chat("hello?")
    assert gateway.requests[0]["model"] == "cold/model"
    assert done.stdout == "Hello there!\n"
    assert "cold/model is not loaded yet" in done.stderr


def test_no_model_at_all(chat, gateway):
    gateway.models = []
    done = chat("hello?")
    assert (done.returncode, done.stdout) == (4, "")
    assert "has no models" in done.stderr


def test_settings_travel(chat, gateway):
    chat("hi", "-m", "org/m", "--system", "Be brief.", "--temperature", "0", "--seed", "7", "--max-tokens", "5")
    request = gateway.requests[0]
    assert request["model"] == "org/m"
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (request["temperature"], request["seed"], request["max_tokens"]) == (0, 7, 5)


def test_unsaid_settings_do_not_travel(chat, gateway):
    chat("hi")
    assert set(gateway.requests[0]) == {"model", "messages", "seed", "stream", "stream_options"}


@pytest.mark.parametrize(
    ("arguments", "stdin", "asked"),
    [
        ([], "  indented\n\n", "  indented"),
        (["summarise"], "a text\n", "summarise\n\na text"),
        (["naïve 漢字"], "", "naïve 漢字"),
    ],
)
def test_piped_text(chat, gateway, arguments, stdin, asked):
    assert chat(*arguments, stdin=stdin).returncode == 0
    assert gateway.requests[0]["messages"][-1]["content"] == asked


def test_nothing_to_ask(chat, gateway):
    done = chat(stdin="\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert gateway.requests == []


def test_url_and_key_from_the_environment(helexa, gateway):
    done = helexa("chat", "hi", HELEXA_BASE_URL=f"{gateway.url}/v1/", HELEXA_API_KEY="sesame")
    assert done.stdout == "Hello there!\n"
    assert gateway.authorization == "Bearer sesame"


def test_no_key_no_header(chat, gateway):
    chat("hi")
    assert gateway.authorization is None


def test_reasoning_is_not_part_of_the_answer(chat, gateway):
    gateway.pieces = [{"choices": [{"delta": {"reasoning_content": "hmm"}}]}, "42"]
    assert chat("hi").stdout == "42\n"


def test_control_characters_never_reach_stdout(chat, gateway):
    gateway.pieces = ["a\x1b", "[31mred\x1b]0;title\x07", "\x9b2J\r\x00\x7f", "tab\tline\n"]
    assert chat("hi").stdout == "a[31mred]0;title2Jtab\tline\n"


def test_chunks_of_unexpected_shape_are_passed_over(chat, gateway):
    strange = [{}, {"choices": None}, {"choices": [3]}, {"choices": [{"delta": {"content": 5}}], "usage": []}]
    gateway.pieces = [*strange, "fine"]
    assert chat("hi").stdout == "fine\n"


@pytest.mark.parametrize(
    ("status", "headers", "envelope", "code", "shown"),
    [
        (404, {}, NOT_FOUND, 4, "helexa: model 'nope' not found\n"),
        (503, {"Retry-After": "0"}, BUSY, 1, "helexa: all seats are taken\n"),
        (500, {}, {"error": "plain \x1b[1mtext"}, 1, "helexa: plain [1mtext\n"),
        (502, {}, ["no envelope"], 1, "helexa: {url} answered HTTP 502\n"),
        (
            200,
            {},
            {"id": "not a stream"},
            1,
            "helexa: {url} did not return an event stream; is this a helexa server?\n",
        ),
    ],
)
def test_refusals_are_one_line(chat, gateway, status, headers, envelope, code, shown):
    gateway.refusal = (status, headers, envelope)
    done = chat("hi", "-m", "nope")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == shown.replace("{url}", gateway.url)


def test_an_error_in_the_middle(chat, gateway):
    gateway.pieces = ["half", {"error": {"message": "the engine died", "type": "api_error", "code": None}}]
    done = chat("hi")
    assert (done.returncode, done.stdout) == (1, "half\n")
    assert done.stderr == "helexa: the engine died\n"


def test_a_connection_that_breaks_in_the_middle(chat, gateway):
    gateway.pieces = ["half", "DROP"]
    done = chat("hi")
    assert (done.returncode, done.stdout) == (3, "half\n")
    assert done.stderr.startswith("helexa: the ")


def test_ctrl_c_ends_the_answer_on_the_server_too(environ, gateway):
    gateway.pieces = ["begun", "WAIT"]
    command = [sys.executable, "-m", "helexa", "chat", "hi", "--url", gateway.url]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environ, text=True, **pipes) as process:
        assert process.stdout.read(5) == "begun"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert gateway.gone.wait(30)
        assert process.stderr.read() == ""
