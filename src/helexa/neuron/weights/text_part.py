"""The text model of a multimodal checkpoint: its configuration and its tensor names."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from helexa.core.errors import ModelFileError

_TEXT = re.compile(
    r"(?:model\.language_model\.|language_model\.model\.)(?P<rest>.+)|language_model\.(?P<head>lm_head\..+)"
)
_HEAD = "lm_head."
_DRAFTING = "mtp."  # multi-token prediction layers, which text-only models can have, too
_OTHERS = re.compile(r"(?:model\.)?(?:visual|vision\w*|audio\w*|multi_modal\w*|embed_(?:vision|audio))\.")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's flat configuration; missing keys are taken from the outer configuration.

    The suffix `_text` is removed from `model_type`: `qwen3_5_text` becomes `qwen3_5`.

    Raises:
        ModelFileError: `text_config` is not an object.
    """
    inner = config.get("text_config", {})
    if not isinstance(inner, dict):
        raise ModelFileError("config: 'text_config' is not an object")
    outer = {key: value for key, value in config.items() if key == "quantization_config" or not key.endswith("_config")}
    flat = {**outer, **inner}
    if isinstance(flat.get("model_type"), str):
        flat["model_type"] = flat["model_type"].removesuffix("_text")
    return flat


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the text model's tensors: name in a text-only model -> name in this checkpoint.

    Raises:
        ModelFileError: two tensors map to the same name.
    """
    names = list(names)
    inside = any(_TEXT.fullmatch(name) for name in names)
    found: dict[str, str] = {}
    for name in names:
        plain = _plain_name(name, inside)
        if plain in found:
            raise ModelFileError(f"tensors {found[plain]} and {name} are the same in the text model")
        if plain is not None:
            found[plain] = name
    return found


def left_out(names: Iterable[str]) -> str:
    """Return a short description of skipped tensors for the log."""
    parts = Counter(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(f"{part} ({count})" for part, count in parts.most_common(5))


def _plain_name(name: str, inside: bool) -> str | None:
    """Return the name in a text-only model, or None.

    Args:
        inside: whether a prefix marks the names of the text model.
    """
    match = _TEXT.fullmatch(name)
    if match:
        return match["head"] or f"model.{match['rest']}"
    if inside:
        return name if name.startswith(_HEAD) else None
    return None if name.startswith(_DRAFTING) or _OTHERS.match(name) else name
