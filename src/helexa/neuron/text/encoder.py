"""Tokenize text with the `tokenizers` library in this process."""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tokenizers
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from helexa.core.errors import ModelFileError

_SPACES = (" ", "▁")
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # two characters of a Python string


@contextmanager
def backend_errors(problem: str, advice: str) -> Iterator[None]:
    """Convert all errors in the `with` block, even Rust panics, to a `ModelFileError`.

    Its message consists of `problem` and the error of the library, followed by `advice`.
    """
    try:
        yield
    except BaseException as error:  # a panic of Rust code is a `PanicException`, which is no `Exception`
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(f"{problem}: {' '.join(str(error).split())[:500]}", advice=advice) from error


class BackendEncoder:
    """An `Encoder` that calls the `tokenizers` library in this process.

    The library holds Python's interpreter lock while it tokenizes, so no other thread of this process runs.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._variants: dict[tuple[bool, bool], tokenizers.Tokenizer] = {}

    def ids(self, text: str, *, parse_special: bool, continues: bool) -> list[int]:
        """Return the token ids of a text (see `Encoder.ids`)."""
        return _encoding(self._variant(parse_special, continues), text).ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return start and end of each token of a text (see `Encoder.spans`)."""
        spans = _encoding(self._backend, text).offsets
        # `_encoding` joins the two characters of a pair. `joined` has the index of each joined character.
        joined = [match.start() - index for index, match in enumerate(_SURROGATE_PAIR.finditer(text))]
        if not joined:
            return spans
        return [(start + bisect_left(joined, start), end + bisect_left(joined, end)) for start, end in spans]

    def _variant(self, parse_special: bool, continues: bool) -> tokenizers.Tokenizer:
        """Return the tokenizer for these arguments of `ids`. Variants share one model."""
        if parse_special and not continues:
            return self._backend
        variant = self._variants.get((parse_special, continues))
        if variant is None:
            variant = tokenizers.Tokenizer(self._backend.model)
            if self._backend.normalizer is not None:
                variant.normalizer = self._backend.normalizer
            if self._backend.pre_tokenizer is not None:
                variant.pre_tokenizer = self._backend.pre_tokenizer
            if continues:
                _remove_space_prefix(variant)
            variant.add_tokens([self._added[token_id] for token_id in sorted(self._added)])
            variant.encode_special_tokens = not parse_special
            self._variants[parse_special, continues] = variant
        return variant


def _encoding(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    with backend_errors("the tokenizer fails on this text", "change the text, or use another model"):
        try:
            return backend.encode(text, add_special_tokens=False)
        except TypeError:  # the library's error for lone surrogates
            replaced = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return backend.encode(replaced, add_special_tokens=False)


def _remove_space_prefix(backend: Tokenizer) -> None:
    """Remove from `backend` the rules that add a space before a text."""
    # Many SentencePiece models add this space. A text that continues other tokens must not get the space.
    # The new rules are new objects, because other tokenizers may share the old objects.
    if backend.normalizer is not None:
        normalizer = normalizers.Sequence([])
        normalizer.__setstate__(_encoded(_without_prefix(_state(backend.normalizer), "normalizers")))
        backend.normalizer = normalizer
    if backend.pre_tokenizer is not None:
        pre_tokenizer = pre_tokenizers.Sequence([])
        pre_tokenizer.__setstate__(_encoded(_without_prefix(_state(backend.pre_tokenizer), "pretokenizers")))
        backend.pre_tokenizer = pre_tokenizer


def _without_prefix(component: dict[str, Any], steps: str) -> dict[str, Any]:
    """Return a normalizer's or pre-tokenizer's configuration that adds no space.

    `steps` is the key of the list of components in a sequence.
    """
    if component["type"] == "Sequence":
        return component | {steps: [_without_prefix(step, steps) for step in component[steps]]}
    if component["type"] == "Prepend" and component["prepend"] in _SPACES:
        return {"type": "Sequence", steps: []}
    if component["type"] == "Metaspace":
        return component | {"prepend_scheme": "never"}
    if component.get("add_prefix_space"):
        return component | {"add_prefix_space": False}
    return component


def _state(component: Any) -> dict[str, Any]:
    return json.loads(component.__getstate__())


def _encoded(state: dict[str, Any]) -> bytes:
    return json.dumps(state).encode()
