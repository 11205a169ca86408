"""Normalizers that lengthen a text: which growth is accepted."""

import base64
from typing import Any

import pytest

from helexa.core.errors import ModelFileError
from helexa.neuron.text.tokenizer_json import check_growth

SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
SPACES = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
HUNDRED = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
REGEX = {"type": "Replace", "pattern": {"Regex": "a?"}, "content": "a" * 30}


def charsmap(*replacements: bytes) -> dict[str, str]:
    table = bytes(8)
    content = len(table).to_bytes(4, "little") + table + b"\0".join(replacements) + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def sequence(*rules: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(rules)}


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "NFC"},
        sequence({"type": "Prepend", "prepend": "▁"}, SPACE),  # Llama 2
        sequence(charsmap(b"x" * 33, b" "), SPACES),  # XLM-R
        {"type": "BertNormalizer", "lowercase": True},
        HUNDRED,
    ],
)
def test_usual_tokenizer_normalizers_are_accepted(normalizer: Any) -> None:
    check_growth({"normalizer": normalizer})


@pytest.mark.parametrize(
    "normalizer",
    [
        sequence(HUNDRED, HUNDRED),
        sequence(sequence(HUNDRED), sequence(sequence(HUNDRED))),
        sequence(REGEX, REGEX),
        {"type": "Replace", "pattern": {"String": ""}, "content": "a" * 1000},
        sequence(*[{"type": "NFKD"}] * 4),
        charsmap(b"x" * 1000),
        sequence(*[HUNDRED] * 4000),
    ],
)
def test_tokenizer_normalizers_that_multiply_a_text_are_rejected(normalizer: Any) -> None:
    with pytest.raises(ModelFileError, match="times longer, which is rejected"):
        check_growth({"normalizer": normalizer})


def test_tokenizer_normalizer_that_adds_a_long_prefix_is_rejected() -> None:
    with pytest.raises(ModelFileError, match="adds more than 4096 bytes"):
        check_growth({"normalizer": sequence(SPACE, {"type": "Prepend", "prepend": "▁" * 2000})})
