"""What a model's files say of its vectors."""

import json
from pathlib import Path
from typing import Any

import pytest

from helexa.neuron.text.pooling import POOLING_FILE, pooling_in_directory, pooling_in_gguf


def _directory(tmp_path: Path, content: str) -> Path:
    file = tmp_path / POOLING_FILE
    file.parent.mkdir()
    file.write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["cls"]}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, "mean"),
        ({}, "mean"),
    ],
)
def test_a_checkpoint_says_how_it_is_pooled(tmp_path: Path, config: dict[str, Any], pooling: str) -> None:
    assert pooling_in_directory(_directory(tmp_path, json.dumps(config))) == pooling


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, content: str) -> None:
    assert pooling_in_directory(_directory(tmp_path, content)) == "mean"


def test_without_the_file_it_is_the_mean(tmp_path: Path) -> None:
    assert pooling_in_directory(tmp_path) == "mean"


@pytest.mark.parametrize(
    ("said", "pooling"), [(0, "mean"), (1, "mean"), (2, "cls"), (3, "last"), (4, "mean"), ("3", "mean"), (None, "mean")]
)
def test_so_does_a_gguf_file(said: object, pooling: str) -> None:
    assert pooling_in_gguf({"general.architecture": "qwen3", "qwen3.pooling_type": said}) == pooling
    assert pooling_in_gguf({}) == "mean"
