"""Convert the tokens of a vocabulary to the bytes of text that they represent."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

from helexa.core.errors import ModelFileError

_SPACE = "▁"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level vocabularies: a dict from character to the byte that it represents.

    Printable bytes are represented by the character with the same code. The other bytes are represented by the
    characters from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(unprintable)}


_BYTES = _byte_alphabet()


Speller = Callable[[str], bytes]


def token_spellers(backend: Tokenizer) -> tuple[Speller, Speller]:
    """Return functions that convert the vocabulary text of a token to bytes, as the tokenizer's decoder does.

    Returns:
        A function for the tokens of the tokenization model, and a function for added tokens that are not special.

    Raises:
        ModelFileError: the decoder is not byte-level, SentencePiece or WordPiece.
    """
    kinds = set(_decoder_kinds(json.loads(backend.decoder.__getstate__()))) if backend.decoder else set()
    if "ByteLevel" in kinds:
        return _byte_level, str.encode
    if kinds & {"Metaspace", "ByteFallback"}:
        return _sentencepiece, _sentencepiece  # Gemma's runs of spaces are added tokens
    if "WordPiece" in kinds:
        return _wordpiece, str.encode
    raise ModelFileError(f"a tokenizer with the decoder {', '.join(sorted(kinds)) or 'none'} is not supported")


def _decoder_kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for inner in decoder.get("decoders", ()):
        yield from _decoder_kinds(inner)


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return token.replace(_SPACE, " ").encode() if byte is None else bytes.fromhex(byte[1])


def _wordpiece(token: str) -> bytes:
    return token[2:].encode() if token.startswith("##") else f" {token}".encode()
