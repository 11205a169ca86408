"""The pooling method that a model's files specify."""

import json
from pathlib import Path
from typing import Any

import pytest

from helexa.core.errors import ModelFileError
from helexa.neuron.text.settings_and_sampling_defaults import (
    POOLING_FILE,
    pooling_in_directory,
    pooling_in_gguf,
    require_known_modules,
)
from helexa.neuron.text.tokenizer_files import read_text_files


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
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "max"),
        ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
        ({"pooling_mode": "max", "word_embedding_dimension": 384, "include_prompt": True}, "max"),
        ({"pooling_mode": None}, "mean"),
        ({}, "mean"),
    ],
)
def test_embedding_pooling_is_read_from_a_model_directory(tmp_path: Path, config: dict[str, Any], pooling: str) -> None:
    assert pooling_in_directory(_directory(tmp_path, json.dumps(config))) == pooling


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}, "'cls with lasttoken'"),
        ({"pooling_mode": ["max", "mean"]}, "'max with mean'"),
        ({"pooling_mode": "splade"}, "'splade'"),
        ({"pooling_mode_attention_tokens": True}, "'attention'"),
        ({"pooling_mode": 3}, "'3'"),
    ],
)
def test_embedding_pooling_that_is_not_implemented_is_rejected(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelFileError, match=f"the pooling {named} is not supported"):
        pooling_in_directory(_directory(tmp_path, json.dumps(config)))


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_invalid_pooling_file_selects_mean_pooling(tmp_path: Path, content: str) -> None:
    assert pooling_in_directory(_directory(tmp_path, content)) == "mean"


def test_missing_pooling_file_selects_mean_pooling(tmp_path: Path) -> None:
    assert pooling_in_directory(tmp_path) == "mean"


def _modules(*kinds: object) -> str:
    return json.dumps([{"idx": n, "name": str(n), "path": f"{n}_X", "type": kind} for n, kind in enumerate(kinds)])


KNOWN = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]


def test_sentence_transformers_module_that_changes_embeddings_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(_modules(*KNOWN, "sentence_transformers.models.Dense"))
    with pytest.raises(ModelFileError, match=r"the module 'Dense' is not supported"):
        require_known_modules(tmp_path)
    with pytest.raises(ModelFileError, match=r"the module 'Dense' is not supported"):
        (tmp_path / "tokenizer.json").write_text("{}")
        read_text_files(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        None,
        _modules(*KNOWN),
        _modules(*KNOWN, "sentence_transformers.models.Normalize", "custom.modules.Dropout"),
        _modules(None, 3),
        "[",
        "{}",
        '["Dense"]',
    ],
)
def test_known_or_malformed_lists_of_sentence_transformers_modules_are_accepted(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "modules.json").write_text(content)
    require_known_modules(tmp_path)


@pytest.mark.parametrize(
    ("value", "pooling"),
    [(0, "mean"), (1, "mean"), (2, "cls"), (3, "last"), (-1, "mean"), ("3", "mean"), (None, "mean")],
)
def test_embedding_pooling_is_read_from_gguf_metadata(value: object, pooling: str) -> None:
    assert pooling_in_gguf({"general.architecture": "qwen3", "qwen3.pooling_type": value}) == pooling
    assert pooling_in_gguf({}) == "mean"


@pytest.mark.parametrize(("value", "reason"), [(4, "the model is a reranker"), (9, "the method is unknown")])
def test_pooling_of_gguf_metadata_that_is_not_implemented_is_rejected(value: int, reason: str) -> None:
    with pytest.raises(ModelFileError, match=f"bert.pooling_type {value} is not supported: {reason}"):
        pooling_in_gguf({"general.architecture": "bert", "bert.pooling_type": value})
