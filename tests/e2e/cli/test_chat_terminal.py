"""`helexa chat` on a terminal."""

import stat
from pathlib import Path

import pytest

from cli.screen import CTRL_C, CTRL_D, Screen

PROMPT = ">>> "


@pytest.fixture
def start_chat(environ, gateway):
    """Open a chat and wait for its first prompt."""
    screens = []

    def start(*arguments, **variables):
        screen = Screen(["chat", "--url", gateway.url, *arguments], environ | variables)
        screens.append(screen)
        screen.expect(PROMPT)
        return screen

    yield start
    for screen in screens:
        screen.close()


def messages(request):
    return [(turn["role"], turn["content"]) for turn in request["messages"]]


def test_each_request_contains_the_whole_conversation(start_chat, gateway):
    screen = start_chat("--system", "Be kind.")
    assert "warm/model" in screen.text
    screen.type("hello\n")
    screen.expect("Hello there!")
    screen.expect(PROMPT)
    gateway.chunks = ["Fine."]
    screen.type("and you?\n")
    screen.expect("Fine.")
    screen.expect(PROMPT)
    screen.type("/stats\n")
    screen.expect("prompt 12 tokens (8 from the cache), answer 3 tokens, first after")
    screen.type("/exit\n")
    assert screen.wait_for_exit() == 0
    assert messages(gateway.requests[1]) == [
        ("system", "Be kind."),
        ("user", "hello"),
        ("assistant", "Hello there!"),
        ("user", "and you?"),
    ]


def test_ctrl_c_stops_the_response_and_keeps_the_chat_open(start_chat, gateway):
    gateway.chunks = ["begun", "WAIT"]
    screen = start_chat()
    screen.type("a long story\n")
    screen.expect("begun")
    screen.type(CTRL_C)
    screen.expect("[stopped]")
    assert gateway.client_disconnected.wait(60)
    screen.expect(PROMPT)
    gateway.chunks = ["as you wish"]
    screen.type("shorter\n")
    screen.expect("as you wish")
    screen.expect(PROMPT)
    screen.type("/exit\n")
    assert screen.wait_for_exit() == 0
    assert messages(gateway.requests[1]) == [("user", "a long story"), ("assistant", "begun"), ("user", "shorter")]


def test_ctrl_c_before_the_response_discards_the_message(start_chat, gateway):
    gateway.chunks = ["WAIT"]
    screen = start_chat()
    screen.type("first\n")
    assert gateway.request_received.wait(60)
    screen.type(CTRL_C)
    screen.expect("[stopped]")
    screen.expect(PROMPT)
    gateway.chunks = ["yes"]
    screen.type("second\n")
    screen.expect("yes")
    assert messages(gateway.requests[1]) == [("user", "second")]


def test_pressing_ctrl_c_twice_at_the_prompt_ends_helexa_chat(start_chat):
    screen = start_chat()
    screen.press_until(CTRL_C, "Ctrl-C again")
    screen.expect(PROMPT)
    screen.press_until(CTRL_C, "\n")
    assert screen.wait_for_exit() == 0


def test_ctrl_d_at_the_prompt_ends_helexa_chat(start_chat):
    screen = start_chat()
    screen.type(CTRL_D)
    assert screen.wait_for_exit() == 0


def test_triple_quotes_enclose_a_message_of_several_lines(start_chat, gateway):
    screen = start_chat()
    screen.type('"""one\n')
    screen.expect("... ")
    screen.type("/two\n")
    screen.expect("... ")
    screen.type('three"""\n')
    screen.expect("Hello there!")
    assert messages(gateway.requests[0]) == [("user", "one\n/two\nthree")]


def test_slash_retry_sends_the_last_message_again(start_chat, gateway):
    screen = start_chat()
    screen.type("why?\n")
    screen.expect("Hello there!")
    screen.expect(PROMPT)
    gateway.chunks = ["Because."]
    screen.type("/retry\n")
    screen.expect("Because.")
    screen.expect(PROMPT)
    screen.type("ok\n")
    screen.expect("Because.")
    assert messages(gateway.requests[1]) == [("user", "why?")]
    assert messages(gateway.requests[2]) == [("user", "why?"), ("assistant", "Because."), ("user", "ok")]


def test_slash_commands_change_system_prompt_and_model(start_chat, gateway):
    screen = start_chat()
    screen.type("hello\n")
    screen.expect("Hello there!")
    for line, output in [
        ("/system Be brief.", "Be brief."),
        ("/clear", "forgotten"),
        ("/model cold/model", "* cold/model"),
        ("/model cold/modle", "did you mean 'cold/model'?"),
        ("/retry", "there is no answer to repeat"),
        ("/nope", "unknown command /nope"),
        ("/help", "/retry"),
    ]:
        screen.expect(PROMPT)
        screen.type(f"{line}\n")
        screen.expect(line)
        screen.expect(output)
    screen.expect(PROMPT)
    screen.type("now\n")
    screen.expect("Hello there!")
    assert gateway.requests[1]["model"] == "cold/model"
    assert messages(gateway.requests[1]) == [("system", "Be brief."), ("user", "now")]


def test_error_response_is_shown_and_the_chat_stays_open(start_chat, gateway):
    screen = start_chat()
    gateway.error_response = (
        503,
        {"Retry-After": "0"},
        {"error": {"message": "too busy", "code": "rate_limit_exceeded"}},
    )
    screen.type("hello\n")
    screen.expect("error: too busy")
    screen.expect(PROMPT)
    gateway.error_response = None
    screen.type("/retry\n")
    screen.expect("Hello there!")
    assert messages(gateway.requests[1]) == [("user", "hello")]


def test_control_characters_of_the_model_are_removed(start_chat, gateway):
    gateway.chunks = ["\x1b]0;ev", "il\x07", {"choices": [{"delta": {"reasoning_content": "\x1b[2Jhm"}}]}, "done"]
    screen = start_chat(NO_COLOR="1")
    start = len(screen.text)
    screen.type("hello\n")
    screen.expect("]0;evil")
    screen.expect("[2Jhm")
    screen.expect("done")
    assert not [danger for danger in ("\x1b]", "\x1b[2J", "\x07") if danger in screen.text[start:]]


def test_unknown_model_ends_the_command_before_input_is_read(environ, gateway):
    screen = Screen(["chat", "--url", gateway.url, "--model", "warm/modle"], environ)
    assert screen.wait_for_exit() == 4
    assert "did you mean 'warm/model'?" in screen.text
    screen.close()


def test_input_history_is_saved_in_a_file_that_only_the_user_can_read(start_chat, environ):
    screen = start_chat()
    screen.type("remember me\n")
    screen.expect("Hello there!")
    screen.expect(PROMPT)
    screen.type("/exit\n")
    assert screen.wait_for_exit() == 0
    file = Path(environ["XDG_STATE_HOME"]) / "helexa" / "chat_history"
    assert "remember me" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    second = start_chat()
    second.type("\x1b[A\x1b[A\n")
    second.expect("remember me")
    second.expect("Hello there!")


def test_image_is_sent_with_the_next_message(start_chat, gateway, tmp_path):
    picture, file = tmp_path / "a picture.gif", tmp_path / "talk.json"
    picture.write_bytes(b"GIF89a")
    screen = start_chat()
    for line, reply in (
        ("/image", "/image needs a file, as in /image photo.jpg"),
        (f"/image {tmp_path}/missing.png", "missing.png: No such file"),
        (f"/image {picture}", "the next message has 1 image"),
        ("what is it?", "Hello there!"),
        (f"/save {file}", "2 messages saved"),
        (f"/load {file}", "2 messages loaded"),
        ("/retry", "Hello there!"),
        ("and now?", "Hello there!"),
        (f"/image {picture}", "the next message has 1 image"),
        ("/clear", "forgotten"),
        ("hi", "Hello there!"),
    ):
        screen.type(f"{line}\n")
        screen.expect(reply)
        screen.expect(PROMPT)
    part = {"type": "image_url", "image_url": {"url": "data:image/gif;base64,R0lGODlh"}}
    question = ("user", [part, {"type": "text", "text": "what is it?"}])
    sent = [messages(request) for request in gateway.requests]
    assert sent[:2] == [[question], [question]]
    assert sent[2] == [question, ("assistant", "Hello there!"), ("user", "and now?")]
    assert sent[3] == [("user", "hi")]
