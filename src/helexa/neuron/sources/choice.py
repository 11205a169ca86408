"""Which files of a repository make up its model, decided from their names alone."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from helexa.core.errors import SourceError
from helexa.neuron.text.pooling import POOLING_FILE
from helexa.neuron.weights.gguf import part_names
from helexa.neuron.weights.quant_form import AUTO, NAMES, is_quant

SHARD_INDEX = "model.safetensors.index.json"
_ENDING = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)
_BESIDE_SAFETENSORS = (".safetensors", ".json", ".jinja", ".txt", ".model")


def chosen_files(source: str, names: Sequence[str], quant: str | None) -> list[str]:
    """Of a repository's files those that make up the model: a GGUF model, or the checkpoint and what describes it.

    Without `quant` a checkpoint is preferred; with one, the first GGUF file whose name has it (underscores aside), or
    a checkpoint that can be quantised so while it loads.

    Raises:
        SourceError: `empty_repo`, or `quant_not_found` with the nearest name.
    """
    ggufs = sorted(
        name for name in names if name.lower().endswith(".gguf") and not _file_name(name).startswith("mmproj")
    )
    # Where there is an index, a file that it cannot name holds the same weights once more.
    twice = "consolidated" if SHARD_INDEX in names else "/"
    checkpoint = sorted(
        name
        for name in names
        if name == POOLING_FILE
        or ("/" not in name and name.endswith(_BESIDE_SAFETENSORS) and not name.startswith(twice))
    )
    dense = "config.json" in checkpoint and any(name.endswith(".safetensors") for name in checkpoint)
    if quant and quant.lower() != AUTO:
        matching = [name for name in ggufs if _plain(quant) in _plain(_file_name(name))]
        if matching:
            return part_names(matching[0])
        if not dense or not is_quant(quant):
            raise _quant_not_found(source, quant, ggufs, dense)
    if dense:
        return checkpoint
    if ggufs:
        return part_names(ggufs[0])
    kind = "an image model" if "model_index.json" in names else "no model files: neither .safetensors nor .gguf"
    raise SourceError(f"{source} holds {kind}", kind="empty_repo", model_id=source)


def _quant_not_found(source: str, quant: str, ggufs: Sequence[str], dense: bool) -> SourceError:
    quant = quant[:100]  # it may be as long as a request
    available = list(dict.fromkeys(_ENDING.sub("", _file_name(name)).rpartition("-")[2] for name in ggufs))
    has = f"it has {', '.join(available)}" if available else "it has no .gguf files at all"
    if dense:
        available += NAMES
        has += f"; its checkpoint can be quantised to {', '.join(NAMES)}"
    near = difflib.get_close_matches(quant.upper(), [tag.upper() for tag in available], n=1, cutoff=0.0)
    nearest = next((tag for tag in available if near and tag.upper() == near[0]), None)
    hint = f"; did you mean {nearest}?" if nearest else ""
    return SourceError(
        f"{source} has no file of quantisation '{quant}': {has}{hint}",
        kind="quant_not_found",
        model_id=source,
        requested=quant,
        available=available,
        nearest=nearest,
    )


def model_path(snapshot: Path, files: Sequence[str]) -> Path:
    """Where the model is that consists of `files`: the first GGUF file, or the folder of a checkpoint."""
    return snapshot / files[0] if files[0].lower().endswith(".gguf") else snapshot


def _file_name(name: str) -> str:
    return PurePosixPath(name).name


def _plain(text: str) -> str:
    return text.lower().replace("_", "")
