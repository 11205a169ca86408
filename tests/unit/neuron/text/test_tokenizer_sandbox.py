"""Tokenizers in sandbox processes: equal results, and limits on hostile tokenizers."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from helexa.core.errors import ApiError, ModelFileError
from helexa.neuron.processes import sandbox
from helexa.neuron.text import tokenizer_sandbox
from helexa.neuron.text.model_text import ModelText

LETTERS = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
TEXTS = ("", "Hello wörld", " a  b\n", "<|end|>", "字" * 300, "lone \ud800 surrogate", "e\u0301")


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a folder with a byte-level tokenizer, in which `changes` replace parts of tokenizer.json."""
    backend = tokenizers.Tokenizer(models.BPE(LETTERS, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(backend.to_str()) | changes))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>", "chat_template": "{{ messages }}"}')
    return folder


def open_isolated(folder: Path) -> ModelText:
    """Read the text files in a sandbox process, which then tokenizes, as a load does."""
    isolated = tokenizer_sandbox.TokenizerSandbox(folder)
    return ModelText.of(isolated.settings(), isolated)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelText, ModelText]:
    path = write_model(tmp_path_factory.mktemp("model"))
    return ModelText.open(path), open_isolated(path)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("options", [{}, {"parse_special": False}, {"continues": True}, {"add_special": True}])
def test_tokens_and_offsets_from_the_sandboxed_tokenizer_equal_those_of_the_library(
    pair: tuple[ModelText, ModelText], text: str, options: dict[str, bool]
) -> None:
    expected, isolated = (model.tokenizer for model in pair)
    assert isolated.encode(text, **options) == expected.encode(text, **options)
    assert isolated.offsets(text) == expected.offsets(text)


def test_vocabulary_and_settings_of_the_sandboxed_tokenizer_equal_those_of_the_library(
    pair: tuple[ModelText, ModelText],
) -> None:
    expected, isolated = pair
    for token in range(-1, expected.tokenizer.vocab_size + 1):
        assert isolated.tokenizer.token_text(token) == expected.tokenizer.token_text(token)
        assert isolated.tokenizer.token_bytes(token) == expected.tokenizer.token_bytes(token)
    assert isolated.tokenizer.eos_ids == expected.tokenizer.eos_ids != frozenset()
    assert isolated.template.source == expected.template.source == "{{ messages }}"


def test_error_for_a_directory_without_a_tokenizer_names_the_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json and no \.gguf files"):
        open_isolated(tmp_path)


SLOW = {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}}
LONG = {"model": {"type": "BPE", "vocab": LETTERS, "merges": [], "continuing_subword_prefix": "x" * (8 << 20)}}


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tokenizer_sandbox, "ENCODE_SECONDS", 0.2)
    monkeypatch.setattr(tokenizer_sandbox, "SECONDS_PER_BYTE", 0.0)
    yield


@pytest.mark.parametrize("rules", [SLOW, LONG], ids=["backtracking", "prefix of 8 MiB"])
@pytest.mark.usefixtures("short_limit")
def test_tokenizer_call_that_runs_too_long_is_stopped_and_later_calls_work(
    tmp_path: Path, rules: dict[str, Any]
) -> None:
    model = open_isolated(write_model(tmp_path, **rules))
    with pytest.raises(
        ModelFileError, match=r"the tokenizer (failed: the sandbox process runs for too long|fails on this text)"
    ):
        model.tokenizer.encode(("a" * 18 + "b") * 1000)
    assert len(model.tokenizer.encode("b")) == 1


def test_tokenizing_in_the_sandbox_does_not_block_other_threads(pair: tuple[ModelText, ModelText]) -> None:
    """The library holds the interpreter lock. A thread could not count while this process tokenizes."""
    _, isolated = pair
    ended, counts = threading.Event(), 0

    def tokenize() -> None:
        isolated.tokenizer.encode("word " * 40_000)
        ended.set()

    thread = threading.Thread(target=tokenize)
    thread.start()
    while not ended.is_set():
        counts += 1
    thread.join()
    assert counts > 1000


def test_tokenizer_process_that_does_not_respond_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    existing = set(psutil.Process().children())
    model = open_isolated(write_model(tmp_path))
    (process,) = set(psutil.Process().children()) - existing
    process.suspend()  # as if it read from a file system that hangs
    monkeypatch.setattr(sandbox, "MAX_SILENT_SECONDS", 0.05)
    with pytest.raises(ApiError, match="the tokenizer failed: the sandbox process does not respond") as failure:
        model.tokenizer.encode("a")
    assert failure.value.status == 503  # another node may serve the request
    monkeypatch.undo()
    assert not process.is_running()
    assert len(model.tokenizer.encode("a")) == 1


def test_tokenizer_process_ends_with_its_model(tmp_path: Path) -> None:
    existing = set(psutil.Process().children())
    model = open_isolated(write_model(tmp_path))
    processes = set(psutil.Process().children()) - existing
    assert len(processes) == 1
    del model
    psutil.wait_procs(processes, 60)
    assert not any(process.is_running() for process in processes)
