"""Open safetensors files and a `config.json` as the checkpoint of a text model."""

import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from helexa.core.errors import ModelFileError
from helexa.core.logs import quoted
from helexa.neuron.weights.model_file import MODULES_FILE, WHOLE, Part, read_json, text_config
from helexa.neuron.weights.quantized_checkpoints import StoredTensor, stored_tensors
from helexa.neuron.weights.quantized_matrix import Weight
from helexa.neuron.weights.safetensors_shards import file_tensors

_TEXT = re.compile(
    r"(?:model\.language_model\.|language_model\.model\.|model\.text_model\.|backbone\."
    # embedding models, which have no output head
    r"|(?:language_model\.)?(?=(?:embed_tokens|layers|norm|embedding_norm)\.))(?P<rest>.+)"
    r"|language_model\.(?P<head>lm_head\..+)"
)
_DRAFTING = re.compile(r"(?:model\.)?mtp[._]")  # multi-token prediction; text-only models may have it, too
_HEAD = re.compile(r"(?:model\.)?mtp\.(?P<name>(?P<of_model>layers\.|norm\.)?.+)")
_EAGLE_LAYER = re.compile(r"^(?:midlayer|layers\.0)\.")
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.", re.ASCII)
_OTHER_MODALITIES = re.compile(
    r"(?:model\.)?(?:visual|vision\w*|audio\w*|multi_modal\w*|embed_(?:vision|audio)|connector|mlp1)\."
    r"|(?:model\.)?image_newline"
)

_log = logging.getLogger("helexa.neuron.weights")
_CONFIG = "config.json"
_EMBEDDING, _HEAD_WEIGHT = "model.embed_tokens.weight", "lm_head.weight"


def _text_tensor_names(names: Iterable[str], drafting: Container[int] = ()) -> dict[str, str]:
    """Return the stored name of each text tensor, by its name in a text-only model.

    Args:
        drafting: indices of the layers of multi-token prediction, which are not part of the text model.

    Raises:
        ModelFileError: two tensors map to the same name.
    """
    stored_names: dict[str, str] = {}
    for name in names:
        plain = _plain_name(name)
        if plain in stored_names:
            raise ModelFileError(f"tensors {stored_names[plain]} and {name} are both named {plain} in the text model")
        layer = None if plain is None else _LAYER.match(plain)
        if plain is not None and (layer is None or int(layer[1]) not in drafting):
            stored_names[plain] = name
    return stored_names


def head_tensor_names(names: Iterable[str]) -> dict[str, str]:
    """Return the stored names of a draft head's tensors, by plain name.

    `names` are stored names, from safetensors files. Plain names are those of a model with one layer.
    """
    matches = ((name, _HEAD.fullmatch(name)) for name in names)
    return {f"{'model.' if match['of_model'] else ''}{match['name']}": name for name, match in matches if match}


def eagle_tensor_names(names: Iterable[str]) -> dict[str, str]:
    """Return the stored names of an EAGLE-3 head's tensors, by plain name.

    `names` are stored names, from safetensors files. Plain names are those of a model with one layer.
    """
    plain = ((name, _EAGLE_LAYER.sub("layers.0.", name.removeprefix("model."), count=1)) for name in names)
    of_model = ("layers.", "norm.", "embed_tokens.")
    return {f"model.{name}" if name.startswith(of_model) else name: stored for stored, name in plain}


def _drafting_layers(config: Mapping[str, Any]) -> range:
    """Return the indices of the multi-token prediction layers, which come last."""
    layers, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    # DeepSeek's and GLM's checkpoints number these layers like decoder layers.
    return range(layers, layers + more) if type(layers) is int and type(more) is int else range(0)


def _summarize_names(names: Iterable[str]) -> str:
    """Return the five most frequent prefixes of `names` with counts, for a log."""
    # The first two components of a name say what the tensor belongs to.
    modules = Counter(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(f"{module} ({count})" for module, count in modules.most_common(5))


def _plain_name(name: str) -> str | None:
    """Return a tensor's name in a text-only model; None if it is in no text model."""
    # An unknown tensor keeps its name, so that loading the model reports the tensor as unread.
    match = _TEXT.fullmatch(name)
    if match:
        return match["head"] or f"model.{match['rest']}"
    return None if _DRAFTING.match(name) or _OTHER_MODALITIES.match(name) else name


class StoredTensors(ABC):
    """Base of checkpoints whose tensors are `StoredTensor` objects, by name.

    Args:
        missing: function that returns the error message for the name of a missing tensor.
    """

    def __init__(self, named: Mapping[str, StoredTensor], missing: Callable[[str], str]) -> None:
        self._tensors = named
        self._missing = missing
        self.total_bytes = sum(tensor.nbytes for tensor in named.values())  # sizes in the files

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the files."""

    def names(self) -> list[str]:
        """Return the names of the tensors, in file order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return self._find(name).shape

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Weight:
        """Return tensor `name` (see `Checkpoint.read`); fp8 tensors become float32."""
        return self._find(name).read(index, part)

    def on_meta(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return a weight of `shape` on the meta device, in the format of `read(name)`."""
        return self._find(name).on_meta(shape)

    def column_block(self, name: str) -> int:
        """Return how many adjacent columns of tensor `name` must be read together."""
        return self._find(name).column_block

    def _find(self, name: str) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError(self._missing(name))
        return tensor


class SafetensorsCheckpoint(StoredTensors):
    """The `Checkpoint` of a folder with safetensors files and a `config.json`.

    Args:
        names_of: function that selects the tensors to open from the names in the files, such as `head_tensor_names`.
            None to open the tensors of the text model.
    """

    def __init__(self, folder: Path, names_of: Callable[[Iterable[str]], dict[str, str]] | None = None) -> None:
        """Read `config.json` and the headers of the `.safetensors` files in `folder`.

        Raises:
            ModelFileError: a file is missing or invalid, or the quantization of the checkpoint is not supported.
        """
        self.config: dict[str, Any] = text_config(read_json(folder / _CONFIG))
        tensors = file_tensors(folder)
        self._files = {tensor.file.path: tensor.file for tensor in tensors.values()}
        self._stored_names = names = (
            _text_tensor_names(tensors, _drafting_layers(self.config)) if names_of is None else names_of(tensors)
        )
        tied = names_of is None and self.config.get("tie_word_embeddings") is not False
        if tied and _HEAD_WEIGHT in names and not any("embed" in name for name in names):
            # The embedding is stored under the name of the output head: of two tensors that share memory,
            # `safetensors.torch.save_model` writes only the first by name.
            names[_EMBEDDING] = names.pop(_HEAD_WEIGHT)
        skipped = tensors.keys() - names.values()
        self.has_head = bool(skipped) and bool(head_tensor_names(skipped))  # whether the folder has a draft head, too
        if skipped and names_of is None:
            _log.info(
                "tensors outside the text model skipped path=%s names=%s",
                quoted(folder),
                quoted(_summarize_names(skipped)),
            )
        text = {name: tensors[stored] for name, stored in names.items()}
        super().__init__(stored_tensors(text, self.config), lambda name: f"{folder}: the model has no tensor {name}")
        if names_of is None and _HEAD_WEIGHT not in names and (folder / MODULES_FILE).exists():
            self.config.pop("tie_word_embeddings", None)  # embedding models need no output head

    def stored_name(self, name: str) -> str:
        """Return the name of tensor `name` in the files."""
        return self._stored_names.get(name, name)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
