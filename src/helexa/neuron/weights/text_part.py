"""Find the text model in a multimodal checkpoint: its configuration and the names of its tensors."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from helexa.core.errors import ModelFileError

_TEXT = re.compile(
    r"(?:model\.language_model\.|language_model\.model\.|model\.text_model\.)(?P<rest>.+)|language_model\.(?P<head>lm_head\..+)"
)
_DRAFTING = "mtp."  # multi-token prediction layers; text-only models may have these layers, too
_OTHER_MODALITIES = re.compile(
    r"(?:model\.)?(?:visual|vision\w*|audio\w*|multi_modal\w*|embed_(?:vision|audio)|connector|mlp1)\."
    r"|(?:model\.)?image_newline"
)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's configuration, without nested configurations of other modalities.

    If `config` has a nested `text_config`, its keys are moved to the top level and override keys of `config`. The
    suffix `_text` is removed from `model_type`: `qwen3_5_text` becomes `qwen3_5`.

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


def text_tensor_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of the text model's tensors: a dict from the name in a text-only model to the name in `names`.

    Args:
        names: names of all tensors in the checkpoint, including those of other modalities.

    Raises:
        ModelFileError: two tensors map to the same name.
    """
    stored_names: dict[str, str] = {}
    for name in names:
        plain = _plain_name(name)
        if plain in stored_names:
            raise ModelFileError(f"tensors {stored_names[plain]} and {name} are the same in the text model")
        if plain is not None:
            stored_names[plain] = name
    return stored_names


def summarize_names(names: Iterable[str]) -> str:
    """Return the five most frequent prefixes of `names` with their counts, for a log message.

    A prefix is the first two dotted components of a name.
    """
    modules = Counter(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(f"{module} ({count})" for module, count in modules.most_common(5))


def _plain_name(name: str) -> str | None:
    """Return the name of tensor `name` in a text-only model, or None if the tensor is known to be no part of it.

    An unknown tensor keeps its name, so that loading the model reports the tensor as unread.
    """
    match = _TEXT.fullmatch(name)
    if match:
        return match["head"] or f"model.{match['rest']}"
    return None if name.startswith(_DRAFTING) or _OTHER_MODALITIES.match(name) else name
