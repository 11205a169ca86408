"""The bytes that a token of a vocabulary stands for."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

from helexa.core.errors import ModelFileError

_SPACE = "▁"


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies spell bytes: printable ones are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def token_speller(backend: Tokenizer) -> Callable[[str], bytes]:
    """The function from a token's text to its bytes, according to the tokenizer's decoder.

    Raises:
        ModelFileError: when the decoder is neither byte-level nor SentencePiece's.
    """
    kinds = set(_decoder_kinds(json.loads(backend.decoder.__getstate__()))) if backend.decoder else set()
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"Metaspace", "ByteFallback"}:
        return _sentencepiece
    raise ModelFileError(f"a tokenizer with the decoder {', '.join(sorted(kinds)) or 'none'} is not supported")


def _decoder_kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _decoder_kinds(part)


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()
