"""`helexa run` on a terminal with a private engine and a real model."""

import json

import pytest

from cli.screen import CTRL_C, Screen

PROMPT = ">>> "


@pytest.fixture
def screen(environ, smollm2_gguf):
    screen = Screen(["run", str(smollm2_gguf), "--private", "-v", "--temperature", "0", "--max-tokens", "24"], environ)
    screen.expect(": private engine on cpu in ", 120)
    screen.expect(PROMPT)
    yield screen
    screen.close()


def test_slash_commands_configure_save_and_resume_a_chat_with_a_private_engine(screen, tmp_path):
    screen.type("What is the capital of France?\n")
    screen.expect("Paris")
    for line, output in [
        ("/stats", "cpu in "),
        ("/set top_k 5", "top_k 5"),
        ("/set top-k default", "max_tokens 24"),
        ("/set top_k many", "'many' is not a valid value for top_k"),
        ("/set nonsense 1", "/set needs NAME and VALUE; NAME is one of temperature, top_p"),
        (f"/save {tmp_path / 'talk.json'}", "2 messages saved"),
        ("/set max_tokens 4000", "max_tokens 4000"),
    ]:
        screen.expect(PROMPT)
        screen.type(f"{line}\n")
        screen.expect(output)
    screen.expect(PROMPT)
    screen.type("Tell me a very long story, and never end it.\n")
    screen.expect("\n")
    screen.expect(" ")  # the response has started
    screen.press_until(CTRL_C, "[stopped]")
    screen.expect(PROMPT)
    screen.type(f"/load {tmp_path / 'talk.json'}\n")
    screen.expect("2 messages loaded")
    screen.expect(PROMPT)
    screen.type("/set max_tokens 24\n")
    screen.expect(PROMPT)
    screen.type("/retry\n")
    screen.expect("Paris")
    screen.expect(PROMPT)
    screen.type("/exit\n")
    assert screen.wait_for_exit() == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [turn["role"] for turn in saved["messages"]] == ["user", "assistant"]
