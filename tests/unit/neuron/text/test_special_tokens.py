"""Special tokens by their template variables, compared with `transformers`."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoTokenizer

from helexa.neuron.text.settings_and_sampling_defaults import special_tokens_in_directory, special_tokens_in_gguf
from local_tokenizers import from_gguf

ADDED = {"__type": "AddedToken", "content": "<pad>", "lstrip": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"bos_token": "<s>", "eos_token": None, "pad_token": ADDED}},
        {"tokenizer_config": {"bos_token": "<s>", "add_bos_token": True, "image_token": "<image>"}},
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<image>", "end": "<end>"}}},
        {"tokenizer_config": {"extra_special_tokens": ["<image>"], "additional_special_tokens": ["<end>"]}},
        {"special_tokens_map": {"bos_token": "<b>", "unk_token": {"content": "<unk>"}}},
    ],
)
def test_special_tokens_of_a_directory_equal_those_of_transformers(tmp_path, files):
    Backend(models.WordLevel({"x": 0}, "x")).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | files.pop("tokenizer_config", {})
    for name, value in {**files, "tokenizer_config": config}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    assert special_tokens_in_directory(tmp_path) == AutoTokenizer.from_pretrained(tmp_path).special_tokens_map


def test_malformed_special_tokens_of_a_directory_are_ignored(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": 1, "eos_token": {"content": []}, "x": "y"}')
    (tmp_path / "special_tokens_map.json").write_text('{"extra_special_tokens": {"a_token": 2}, "pad_token": ["<p>"]}')
    assert special_tokens_in_directory(tmp_path) == {}


def test_invalid_special_token_ids_of_a_gguf_file_are_omitted(byte_metadata):
    tokenizer = from_gguf(byte_metadata)
    ids = {"bos_token_id": 257, "eos_token_id": 259, "padding_token_id": 258, "seperator_token_id": 10**6}
    odd = {"unknown_token_id": "<|control|>", "mask_token_id": True, "cls_token_id": -1}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in (ids | odd).items()}
    assert special_tokens_in_gguf(metadata, tokenizer) == {
        "bos_token": "<|control|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<mark é>",
    }
