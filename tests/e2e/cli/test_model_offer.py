"""The model that `helexa run` uses if the command line names none."""

import io

import pytest

from helexa.cli import local_model
from helexa.cli.local_model import FreeMemory, offered_model
from helexa.cli.terminal_output_and_errors import CommandError

QWEN = "Qwen/Qwen3-1.7B-GGUF"
COMMIT = "ab" * 20


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine with 3 GB of free memory on its CPU, no servers and no models."""
    monkeypatch.setattr(local_model, "free_memory", lambda: FreeMemory(3.0, "cpu"))
    monkeypatch.setattr(local_model, "LOCAL_URLS", ())
    for variable in ("HF_HUB_CACHE", "HELEXA_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))


@pytest.fixture
def answer(monkeypatch):
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_best_model_for_the_free_memory_is_offered_with_its_download_size(answer, capsys):
    answer("y\n")
    assert offered_model(ask=True) == f"{QWEN}:Q8_0"
    shown = capsys.readouterr().err
    assert "(3.00 GB of memory free) is qwen3:1.7b" in shown
    assert f"download {QWEN}:Q8_0 (1.8 GB)? [Y/n] " in shown


@pytest.mark.parametrize("text", ["n\n", ""], ids=["no", "end of input"])
def test_declined_download_ends_the_command_with_an_error(answer, text):
    answer(text)
    with pytest.raises(CommandError, match="name a model, as in `helexa run helexa/small`"):
        offered_model(ask=True)


def test_model_that_is_already_downloaded_runs_without_a_question(answer, capsys, tmp_path):
    folder = tmp_path / "HF_HUB_CACHE" / f"models--{QWEN.replace('/', '--')}"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "Qwen3-1.7B-Q8_0.gguf").write_bytes(b"GGUF")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    answer("")
    assert offered_model(ask=True) == f"{QWEN}:Q8_0"
    assert "download" not in capsys.readouterr().err


def test_without_a_terminal_the_default_model_runs_and_is_named_on_stderr(capsys):
    assert offered_model(ask=False) == "helexa/small"
    assert capsys.readouterr().err.startswith("no model named: running helexa/small, whose answers are often wrong")
    assert offered_model(ask=False, quiet=True) == "helexa/small"
    assert capsys.readouterr().err == ""


def test_without_a_model_name_the_model_that_a_local_server_has_loaded_is_used(gateway, monkeypatch, capsys):
    monkeypatch.setattr(local_model, "LOCAL_URLS", (gateway.url,))
    assert offered_model(ask=True) == "warm/model"
    assert capsys.readouterr().err == f"no model named: running warm/model, which {gateway.url} has loaded\n"
    assert offered_model(ask=False, private=True) == "helexa/small"
