"""Convert a vocabulary's tokens to the bytes of the text they represent."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

from helexa.core.errors import ModelFileError

_SPACE = "▁"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level vocabularies: character -> byte; printable bytes map to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(0x100) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(unprintable)}


_BYTES = _byte_alphabet()


Speller = Callable[[str], bytes]


def token_spellers(backend: Tokenizer) -> tuple[Speller, Speller]:
    """Return functions that map a token's text to its bytes, according to the tokenizer's decoder.

    Returns:
        The function for the model's own tokens, and the function for added tokens that are not special.

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
