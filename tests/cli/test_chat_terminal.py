"""`helexa chat` on a terminal."""

import stat
from pathlib import Path

import pytest

from cli.screen import CTRL_C, CTRL_D, Screen

PROMPT = ">>> "


@pytest.fixture
def talk(environ, gateway):
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


def said(request):
    return [(turn["role"], turn["content"]) for turn in request["messages"]]


def test_a_conversation(talk, gateway):
    screen = talk("--system", "Be kind.")
    assert "warm/model" in screen.text
    screen.type("hello\n")
    screen.expect("Hello there!")
    screen.expect(PROMPT)
    gateway.pieces = ["Fine."]
    screen.type("and you?\n")
    screen.expect("Fine.")
    screen.expect(PROMPT)
    screen.type("/stats\n")
    screen.expect("prompt 12 tokens (8 from the cache), answer 3 tokens, first after")
    screen.type("/exit\n")
    assert screen.leave() == 0
    assert said(gateway.requests[1]) == [
        ("system", "Be kind."),
        ("user", "hello"),
        ("assistant", "Hello there!"),
        ("user", "and you?"),
    ]


def test_ctrl_c_stops_the_answer_and_the_talk_goes_on(talk, gateway):
    gateway.pieces = ["begun", "WAIT"]
    screen = talk()
    screen.type("a long story\n")
    screen.expect("begun")
    screen.type(CTRL_C)
    screen.expect("[stopped]")
    assert gateway.gone.wait(30)
    screen.expect(PROMPT)
    gateway.pieces = ["as you wish"]
    screen.type("shorter\n")
    screen.expect("as you wish")
    screen.expect(PROMPT)
    screen.type("/exit\n")
    assert screen.leave() == 0
    assert said(gateway.requests[1]) == [("user", "a long story"), ("assistant", "begun"), ("user", "shorter")]


def test_ctrl_c_before_any_answer_takes_the_question_back(talk, gateway):
    gateway.pieces = ["WAIT"]
    screen = talk()
    screen.type("first\n")
    assert gateway.asked.wait(30)
    screen.type(CTRL_C)
    screen.expect("[stopped]")
    screen.expect(PROMPT)
    gateway.pieces = ["yes"]
    screen.type("second\n")
    screen.expect("yes")
    assert said(gateway.requests[1]) == [("user", "second")]


def test_ctrl_c_twice_at_the_prompt_leaves(talk):
    screen = talk()
    screen.insist(CTRL_C, "Ctrl-C again")
    screen.expect(PROMPT)
    screen.insist(CTRL_C, "\n")
    assert screen.leave() == 0


def test_ctrl_d_leaves(talk):
    screen = talk()
    screen.type(CTRL_D)
    assert screen.leave() == 0


def test_several_lines(talk, gateway):
    screen = talk()
    screen.type('"""one\n')
    screen.expect("... ")
    screen.type("/two\n")
    screen.expect("... ")
    screen.type('three"""\n')
    screen.expect("Hello there!")
    assert said(gateway.requests[0]) == [("user", "one\n/two\nthree")]


def test_retry_asks_the_same_again(talk, gateway):
    screen = talk()
    screen.type("why?\n")
    screen.expect("Hello there!")
    screen.expect(PROMPT)
    gateway.pieces = ["Because."]
    screen.type("/retry\n")
    screen.expect("Because.")
    screen.expect(PROMPT)
    screen.type("ok\n")
    screen.expect("Because.")
    assert said(gateway.requests[1]) == [("user", "why?")]
    assert said(gateway.requests[2]) == [("user", "why?"), ("assistant", "Because."), ("user", "ok")]


def test_system_model_and_clear(talk, gateway):
    screen = talk()
    screen.type("hello\n")
    screen.expect("Hello there!")
    for line, reply in [
        ("/system Be brief.", "Be brief."),
        ("/clear", "forgotten"),
        ("/model cold/model", "* cold/model"),
        ("/model cold/modle", "did you mean 'cold/model'?"),
        ("/retry", "nothing to ask again"),
        ("/nope", "unknown command /nope"),
        ("/help", "/retry"),
    ]:
        screen.expect(PROMPT)
        screen.type(f"{line}\n")
        screen.expect(line)
        screen.expect(reply)
    screen.expect(PROMPT)
    screen.type("now\n")
    screen.expect("Hello there!")
    assert gateway.requests[1]["model"] == "cold/model"
    assert said(gateway.requests[1]) == [("system", "Be brief."), ("user", "now")]


def test_a_refusal_is_shown_and_the_talk_goes_on(talk, gateway):
    screen = talk()
    gateway.refusal = (503, {"Retry-After": "0"}, {"error": {"message": "too busy", "code": "rate_limit_exceeded"}})
    screen.type("hello\n")
    screen.expect("error: too busy")
    screen.expect(PROMPT)
    gateway.refusal = None
    screen.type("/retry\n")
    screen.expect("Hello there!")
    assert said(gateway.requests[1]) == [("user", "hello")]


def test_the_model_cannot_steer_the_terminal(talk, gateway):
    gateway.pieces = ["\x1b]0;ev", "il\x07", {"choices": [{"delta": {"reasoning_content": "\x1b[2Jhm"}}]}, "done"]
    screen = talk(NO_COLOR="1")
    before = len(screen.text)
    screen.type("hello\n")
    screen.expect("]0;evil")
    screen.expect("[2Jhm")
    screen.expect("done")
    assert not [danger for danger in ("\x1b]", "\x1b[2J", "\x07") if danger in screen.text[before:]]


def test_an_unknown_model_is_refused_before_the_first_prompt(environ, gateway):
    screen = Screen(["chat", "--url", gateway.url, "--model", "warm/modle"], environ)
    assert screen.leave() == 4
    assert "did you mean 'warm/model'?" in screen.text
    screen.close()


def test_typed_lines_are_remembered_for_this_user_alone(talk, environ):
    screen = talk()
    screen.type("remember me\n")
    screen.expect("Hello there!")
    screen.expect(PROMPT)
    screen.type("/exit\n")
    assert screen.leave() == 0
    file = Path(environ["XDG_STATE_HOME"]) / "helexa" / "chat_history"
    assert "remember me" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = talk()
    again.type("\x1b[A\x1b[A\n")
    again.expect("remember me")
    again.expect("Hello there!")
