"""Checks of the command `llm` with its plug-in llm-ollama, which speaks only Ollama's API."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checking import MODEL, check, run

LLM = Path(sys.executable).with_name("llm")
NAME = f"ollama/{MODEL}"


def llm(*arguments: str) -> str:
    result = subprocess.run([LLM, *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr[-400:]
    return result.stdout


@check
def models():
    assert NAME in llm("models", "list")
    listed = llm("ollama", "models")
    assert MODEL in listed and "tools" in listed


@check
def prompt_streamed():
    assert llm("-m", NAME, "-o", "num_predict", "20", "-s", "Be brief.", "Say hello.").strip()


@check
def prompt_without_stream():
    assert llm("-m", NAME, "--no-stream", "-o", "num_predict", "20", "Say hello.").strip()


@check
def conversation():
    llm("-m", NAME, "-o", "num_predict", "10", "My name is Ada.")
    assert llm("-c", "-o", "num_predict", "20", "What is my name?").strip()


@check
def schema():
    text = llm(
        "-m", NAME, "--schema", '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}', "1?"
    )
    assert json.loads(text)["n"] in (1, 2)


os.environ.setdefault("LLM_USER_PATH", str(Path.home() / "llm"))
run()
