"""Remove the rule that adds a space before a text from a tokenizer of the `tokenizers` library.

Many SentencePiece models add this space. A text that continues other tokens must not get the space.
"""

import json
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers

_SPACES = (" ", "▁")


def remove_space_prefix(backend: Tokenizer) -> None:
    """Change the normalizer and the pre-tokenizer of `backend` so that no space is added before a text."""
    # New objects: the old objects may belong to other tokenizers.
    if backend.normalizer is not None:
        normalizer = normalizers.Sequence([])
        normalizer.__setstate__(_encoded(_without_prefix(_state(backend.normalizer), "normalizers")))
        backend.normalizer = normalizer
    if backend.pre_tokenizer is not None:
        pre_tokenizer = pre_tokenizers.Sequence([])
        pre_tokenizer.__setstate__(_encoded(_without_prefix(_state(backend.pre_tokenizer), "pretokenizers")))
        backend.pre_tokenizer = pre_tokenizer


def _without_prefix(component: dict[str, Any], steps: str) -> dict[str, Any]:
    """Return the configuration of a normalizer or pre-tokenizer without rules that add a space before the text.

    Args:
        component: the configuration.
        steps: key of the list of components in a sequence.
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
