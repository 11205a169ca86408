"""Read the properties of a model from its files without loading the model."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.models import check_model_type
from helexa.neuron.text.model_text import ModelText
from helexa.neuron.text.sampling_defaults import SamplingDefaults
from helexa.neuron.weights.gguf.config import gguf_config
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.json_object import MAX_JSON_BYTES, parse_json, read_json
from helexa.neuron.weights.text_part import text_config

_LENGTH_BYTES = 8
_UNCOUNTED = ("U8", "I8", "I32")  # packed codes, or scales of quantized values


@dataclass(frozen=True)
class Description:
    """Properties of a model, read from its files. None means that a property is unknown.

    Attributes:
        architecture: `model_type` in a checkpoint's `config.json`, or the architecture name in a GGUF file.
        weights: file format, and dtype of most weights.
        parameters: number of parameters of the model.
        context_length: trained context length, in tokens.
        licence: license named in the GGUF file.
        tools: whether the chat template and the vocabulary support tool calls.
        reasoning: whether the chat template and the vocabulary support reasoning.
        sampling: sampling parameters that the files recommend.
        problem: why helexa's engine cannot run the model; empty if it can.
    """

    architecture: str
    weights: str
    parameters: int | None
    context_length: int | None
    licence: str | None = None
    tools: bool | None = None
    reasoning: bool | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    problem: str = ""


def describe(path: Path) -> Description:
    """Return the properties of the model at `path`, a GGUF file or a folder with a safetensors checkpoint.

    Raises:
        ModelFileError: the files are damaged or are not a model.
    """
    description = _of_checkpoint(path) if path.is_dir() else _of_gguf(path)
    try:
        text = ModelText.open(path)
    except ModelFileError as error:
        return replace(description, problem=description.problem or str(error))
    capabilities = text.capabilities
    return replace(
        description, tools=capabilities.tool_call, reasoning=capabilities.reasoning, sampling=text.sampling_defaults
    )


def _of_gguf(path: Path) -> Description:
    file = GgufFile.open(path)
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.type.name] += prod(tensor.shape)
    context, licence = (file.metadata.get(key) for key in (f"{file.architecture}.context_length", "general.license"))
    return Description(
        architecture=file.architecture,
        weights=f"GGUF, {_most(sizes)}",
        parameters=sizes.total(),
        context_length=context if isinstance(context, int) else None,
        licence=licence if isinstance(licence, str) else None,
        problem=_problem(gguf_config, file),
    )


def _of_checkpoint(folder: Path) -> Description:
    config = text_config(read_json(folder / "config.json"))
    sizes: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        sizes.update(_sizes(file))
    model_type, context = config.get("model_type"), config.get("max_position_embeddings")
    architecture = model_type if isinstance(model_type, str) else "unknown"
    return Description(
        architecture=architecture,
        weights=f"safetensors, {_most(sizes)}",
        parameters=None if any(kind in sizes for kind in _UNCOUNTED) else sizes.total(),
        context_length=context if isinstance(context, int) else None,
        problem=_problem(check_model_type, architecture),
    )


def _problem(check: Callable[[Any], object], subject: object) -> str:
    try:
        check(subject)
    except ModelFileError as error:
        return str(error)
    return ""


def _sizes(path: Path) -> Counter[str]:
    """Return the number of tensor elements of each dtype in a safetensors file. Only the file's header is read.

    Raises:
        ModelFileError: the file cannot be read, or its header is invalid.
    """
    sizes: Counter[str] = Counter()
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = parse_json(file.read(min(length, MAX_JSON_BYTES)), path)
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from error
    for name, tensor in header.items():
        match tensor:
            case {"dtype": str(kind), "shape": [*shape]} if all(isinstance(size, int) for size in shape):
                sizes[kind] += prod(shape)
            case _ if name != "__metadata__":
                raise ModelFileError(f"{path.name}: tensor {name[:100]!r} has an invalid header entry")
            case _:
                pass
    return sizes


def _most(sizes: Counter[str]) -> str:
    return ", ".join(kind for kind, _ in sizes.most_common(1)) or "no weights"
