"""Read the special tokens that chat templates use as variables: `bos_token`, `eos_token` and others.

As in `transformers`, a variable is defined only if the model's files define the token.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helexa.neuron.text.json_file import read_object
from helexa.neuron.text.tokenizers.tokenizer import Tokenizer

# Name in a template, and the key in a GGUF file's metadata.
_GGUF_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


def special_tokens_in_directory(path: Path) -> dict[str, str]:
    """Return the special tokens of the model directory `path`: a dict from variable name to text.

    The tokens are read from `tokenizer_config.json` and `special_tokens_map.json`.

    Raises:
        ModelFileError: one of the files contains no JSON object.
    """
    config = read_object(path / "special_tokens_map.json") | read_object(path / "tokenizer_config.json")
    extra = config.get("extra_special_tokens")
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: _text(value) for key, value in (tokens | (extra if isinstance(extra, dict) else {})).items()}
    return {key: text for key, text in texts.items() if text is not None}


def special_tokens_in_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens in a GGUF file's metadata: a dict from variable name to text."""
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in _GGUF_KEYS.items()}
    texts = {name: tokenizer.token_text(value) if type(value) is int else None for name, value in ids.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _text(token: Any) -> str | None:
    """Return the text of a special token, which configurations specify as a string or as an object with `content`.

    Return None for other values.
    """
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
