"""Types of the tokens in a GGUF file's vocabulary, with corrections of common errors.

This module does not import torch.
"""

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeGuard, TypeVar

_T = TypeVar("_T")


class TokenType(IntEnum):
    """Type of a token. The values are the numbers in GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_BYTE = re.compile("<0x[0-9A-F]{2}>")
_CONTROL = re.compile(
    r"<\|[^\s<>]+>|<[^\s<>]+\|>|<｜[^\s<>]+｜>|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_\w+>|\[/?[A-Z_]+\]"
)
_VISIBLE = re.compile(r"</?(?:think|tool_call|tool_response|tools)>")
_ENDS = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|endoftext|end_of_text|return|call)\|>|<end_of_turn>|<｜end▁of▁sentence｜>"
)
_IDS = ("bos", "eos", "eot", "eom")


def corrected_types(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int] | None) -> list[int]:
    """Return the type of each token, with the types that converters should have written.

    A token of the type NORMAL, UNUSED or of an unknown type becomes a control token if its text looks like a control
    token, and if the file needs the token: the chat template or a key such as `eos_token_id` names the token, or the
    token is a well-known end token. Without this correction, the tokenizer would split the token's text in prompts,
    and the token would not end answers. The markers of reasoning and tool calls become user-defined tokens.

    Args:
        metadata: metadata of the GGUF file.
        tokens: texts of the tokens, by id.
        types: the types in the file; None if the file has no types.
    """
    corrected: list[int] = [TokenType.NORMAL] * len(tokens) if types is None else list(types)
    named = {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in _IDS}
    template = "\n".join(
        value for key, value in metadata.items() if key.startswith("tokenizer.chat_template") and isinstance(value, str)
    )
    for token_id, token in enumerate(tokens):
        if not token or corrected[token_id] in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE):
            continue
        if corrected[token_id] == TokenType.USER_DEFINED:
            if _ENDS.fullmatch(token):
                corrected[token_id] = TokenType.CONTROL
        elif token[0] not in "<[":
            continue  # nearly all tokens of a vocabulary
        elif types is None and _BYTE.fullmatch(token):
            corrected[token_id] = TokenType.BYTE
        elif _VISIBLE.fullmatch(token) and token in template:
            corrected[token_id] = TokenType.USER_DEFINED
        elif _ENDS.fullmatch(token) or (_CONTROL.fullmatch(token) and (token_id in named or token in template)):
            corrected[token_id] = TokenType.CONTROL
    return corrected


def suppressed_tokens(metadata: Mapping[str, Any], rows: int) -> list[int]:
    """Return the ids below `rows` that a model must never generate.

    They are the unused entries of the vocabulary, ids after its end, and the ids at the key `suppress_tokens`. The
    result is empty if the vocabulary is missing or invalid; `GgufVocabulary` reports why.
    """
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not _are(tokens, str) or not tokens:
        return []
    unused: list[int] = []
    if _are(types, int) and len(types) == len(tokens):
        corrected = corrected_types(metadata, tokens, types)
        unused = [token_id for token_id, kind in enumerate(corrected) if kind == TokenType.UNUSED]
    stated = metadata.get("tokenizer.ggml.suppress_tokens")
    never = {*unused, *range(len(tokens), rows), *(stated if _are(stated, int) else ())}
    return sorted(token_id for token_id in never if 0 <= token_id < rows)


def _are(values: Any, kind: type[_T]) -> TypeGuard[list[_T]]:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)
