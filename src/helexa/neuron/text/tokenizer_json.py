"""Read a model's `tokenizer.json`, and reject rules that exhaust memory."""

import base64
import binascii
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from tokenizers import AddedToken, Tokenizer

from helexa.core.errors import UNREADABLE_FILE, ModelFileError, UnsupportedModelError
from helexa.neuron.text.encoder import backend_errors
from helexa.neuron.text.gguf_tokenizer import MAX_ADDED_LENGTH
from helexa.neuron.text.settings_and_sampling_defaults import parse_object
from helexa.neuron.weights.model_file import read_model_file

_log = logging.getLogger("helexa.neuron.text")

MAX_BYTES = 64 << 20

MAX_FACTOR = 256  # Maximum factor by which the rules together may lengthen a text. The rules of XLM-R reach 132.

MAX_PREFIX_BYTES = 4096  # maximum size of a text that a rule adds once

# Bytes of UTF-8 that one byte can become, for the rules without parameters.
_FACTORS = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 11,
    "NFKD": 11,
    "Lowercase": 3,
    "ByteLevel": 2,
    "BertNormalizer": 20,  # spaces around each Chinese character, NFD and lower case
}


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Return the tokenizer in the file at `path`, without truncation and padding.

    Raises:
        ModelFileError: the file cannot be read, exceeds a size limit, or is rejected by the `tokenizers` library.
    """
    try:
        data = read_model_file(path, MAX_BYTES)
    except OSError as error:
        raise ModelFileError(
            f"{path.name} cannot be read: {error.strerror or error}", advice=UNREADABLE_FILE
        ) from error
    parsed = parse_object(data, path.name)
    check_growth(parsed)
    if _added_length(parsed) > MAX_ADDED_LENGTH:
        raise UnsupportedModelError(
            f"{path.name} has added tokens with more than {MAX_ADDED_LENGTH} characters together"
        )
    with backend_errors(f"{path.name} cannot be read", "download the model again"):
        del parsed  # frees memory before the library allocates its own
        backend = Tokenizer.from_buffer(data)
    backend.no_truncation()
    backend.no_padding()
    return backend


def add_configured_tokens(backend: Tokenizer, config: Mapping[str, Any], legacy: Mapping[str, Any]) -> None:
    """Add to `backend` the tokens of other model files that `tokenizer.json` lacks.

    A token is left out, with a warning in the log, if its id is not the next free id.

    Args:
        config: the contents of `tokenizer_config.json`, whose `added_tokens_decoder` has tokens by id.
        legacy: the contents of `added_tokens.json`, ids by text. As in transformers, it is ignored if `config` has
            `added_tokens_decoder`.

    Raises:
        ModelFileError: the tokens are too long.
    """
    stated = config.get("added_tokens_decoder")
    tokens = _decoder_tokens(stated) if isinstance(stated, dict) else _legacy_tokens(config, legacy)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = {token_id: token for token_id, token in tokens.items() if token.content not in known}
    if sum(len(token.content) for token in missing.values()) > MAX_ADDED_LENGTH:
        raise UnsupportedModelError(
            f"the model's files add tokens with more than {MAX_ADDED_LENGTH} characters together"
        )
    for token_id in sorted(missing):
        token, size = missing[token_id], backend.get_vocab_size(with_added_tokens=True)
        current = backend.token_to_id(token.content)
        # A token with another id cannot be added, because the library gives a new token the next free id.
        if (size if current is None else current) == token_id:
            backend.add_tokens([token])
        else:
            _log.warning(
                "added token ignored, because its id is not the next free id token=%r id=%d next_id=%d; its text in "
                "prompts is tokenized as plain text",
                token.content,
                token_id,
                size,
            )


def _decoder_tokens(stated: dict[str, Any]) -> dict[int, AddedToken]:
    """Return the well-formed tokens of `added_tokens_decoder`."""
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    return {
        int(key): AddedToken(token["content"], **{flag: token[flag] for flag in flags if type(token.get(flag)) is bool})
        for key, token in stated.items()
        if key.isdecimal() and isinstance(token, dict) and _is_text(token.get("content"))
    }


def _legacy_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the well-formed tokens of `added_tokens.json`."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    named += stated if isinstance(stated := config.get("additional_special_tokens"), list) else []
    special = {value.get("content") if isinstance(value, dict) else value for value in named}
    return {
        token_id: AddedToken(text, special=text in special, normalized=text not in special)
        for text, token_id in legacy.items()
        if _is_text(text) and type(token_id) is int and token_id >= 0
    }


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value != ""


def _added_length(file: dict[str, Any]) -> int:
    """Return the total number of characters in the well-formed added tokens."""
    added = file.get("added_tokens")
    contents = (token.get("content") for token in added if isinstance(token, dict)) if isinstance(added, list) else ()
    return sum(len(content) for content in contents if isinstance(content, str))


def check_growth(tokenizer: dict[str, Any]) -> None:
    """Check that the normalizer lengthens a text at most `MAX_FACTOR` times.

    Raises:
        ModelFileError: the normalizer may lengthen a text more, or adds more than `MAX_PREFIX_BYTES` once.
    """
    # A chain of replacements could otherwise make gigabytes of a few characters.
    factor = _factor(tokenizer.get("normalizer"))
    if factor > MAX_FACTOR:
        growth = f"{factor:.4g} times longer, which is rejected: the limit is {MAX_FACTOR} times"
        raise UnsupportedModelError(f"the tokenizer's normalizer may make a text {growth}")


def _factor(rule: Any) -> float:
    """Return the largest factor by which a rule lengthens a text."""
    if not isinstance(rule, dict):
        return 1
    match rule:
        case {"type": "Sequence", "normalizers": [*rules]}:
            product = 1.0
            for part in rules:
                product = min(product * _factor(part), 1e30)
            return product
        case {"type": "Prepend", "prepend": str(prefix)}:
            if len(prefix.encode("utf-8", "replace")) > MAX_PREFIX_BYTES:
                raise UnsupportedModelError(
                    f"the tokenizer's normalizer adds more than {MAX_PREFIX_BYTES} bytes to each text"
                )
            return 1
        case {"type": "Replace", "content": str(content)}:
            added = len(content.encode("utf-8", "replace"))
            match rule.get("pattern"):
                case {"String": str(pattern)} if pattern:
                    return max(1.0, added / len(pattern.encode("utf-8", "replace")))
                case _:  # an expression may also match the empty text beside each character
                    return 1 + added
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            return _charsmap_factor(encoded)
        case _:
            return _FACTORS.get(str(rule.get("type")), 1)  # the library rejects rules of unknown types


def _charsmap_factor(encoded: str) -> int:
    """Return the size in bytes of the longest replacement in a SentencePiece map."""
    try:
        charsmap = base64.b64decode(encoded)
    except (binascii.Error, ValueError):
        return 1  # the library rejects the map
    # A map consists of the size of a table (4 bytes), the table, and the replacements. Each replacement ends with a
    # zero byte.
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(map(len, replacements.split(b"\0")), default=1) or 1
