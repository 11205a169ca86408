"""Read a model's memory need and properties from its files, without torch.

The module runs in a sandbox process, because the files are untrusted: `python -m helexa.neuron.lifecycle.inspection`.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError

from helexa.core.errors import UNREADABLE_FILE, ModelFileError
from helexa.neuron.hardware.cpus import physical_cores
from helexa.neuron.models import check_model_type
from helexa.neuron.models.settings import Settings
from helexa.neuron.ops.kernel_header import SAMPLED_ARRAYS
from helexa.neuron.processes import inside_sandbox
from helexa.neuron.processes.sandbox import ProcessPool, Sandbox, SandboxError
from helexa.neuron.text.model_text import ModelText
from helexa.neuron.text.settings_and_sampling_defaults import MAX_SOURCE_LENGTH, SamplingDefaults, TemplateSources
from helexa.neuron.text.template_sandbox_process import TemplateEnvironment
from helexa.neuron.weights.gguf.config import gguf_config
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.model_file import MAX_JSON_BYTES, open_model_file, parse_json, read_json, text_config
from helexa.neuron.weights.vision_config import has_vision

LEAST_CONTEXT = 2048  # context length of the memory estimate: engines need memory for at least this context

_MODULE = "helexa.neuron.lifecycle.inspection"
_MAX_SECONDS = 10.0
_MAX_BYTES = 2 << 30
_MAX_NAME_CHARS = 64
_RUNTIME = 20 << 20
_LOGITS_ARRAYS = 2  # factor on the size of the logits, because the kernels' workspace rounds sizes up to powers of two
_KV_ITEM_BYTES = 2
# Bytes per element of a tensor in the engine's memory, by its safetensors type; 1 for other types.
_UNPACKED_BYTES = {"F64": 8, "I64": 8, "I32": 4, "U32": 4, "F32": 2, "F16": 2, "BF16": 2}

_LENGTH_BYTES = 8
UNCOUNTED = ("U8", "I8", "I32")  # types of packed codes and scales, whose elements do not count as parameters


class InspectionRequest(msgspec.Struct):
    """Request to inspect a model for steps of `rows` tokens of `sequences` sequences."""

    path: str
    rows: int
    sequences: int


class Inspection(msgspec.Struct):
    """Facts from the headers of a model's files."""

    # estimated bytes that the model needs with a context of `LEAST_CONTEXT` tokens; None if unknown
    memory: int | None = None
    context: int | None = None  # trained context length, in tokens; None if unknown
    architecture: str | None = None  # name of the architecture in the files; None if unknown
    parameters: int | None = None  # number of parameters; None if unknown
    # `tool_call`: whether the chat template uses the client's tools. `reasoning`: whether the template can switch
    # reasoning on. If False, the loaded model may still support the feature.
    tool_call: bool = False
    reasoning: bool = False
    vision: bool = False  # whether the model seems to have a vision part
    problem: str = ""  # why helexa's engine cannot run the model; empty if it probably can


class Inspector:
    """Inspects models in a sandbox process. Thread-safe."""

    def __init__(self, rows: int, sequences: int) -> None:
        self._rows, self._sequences = rows, sequences
        self._pool = ProcessPool(_MODULE, kept=1)
        self._sandbox = Sandbox(self._pool, processes=1)

    def inspect(self, path: Path) -> Inspection:
        """Return memory need and properties of a GGUF file or checkpoint folder.

        If the files cannot be read or helexa's engine cannot run the model, the result has only a `problem`.
        """
        request = InspectionRequest(str(path), self._rows, self._sequences)
        try:
            return msgspec.json.decode(self._sandbox.request(msgspec.json.encode(request)), type=Inspection)
        except (SandboxError, OSError) as error:
            return Inspection(problem=f"the files of the model cannot be read: {error}")
        except msgspec.MsgspecError:  # a file name that is not UTF-8
            return Inspection(problem="the path of the model is not valid UTF-8")

    def close(self) -> None:
        """End the idle sandbox process. A later inspection starts another one."""
        self._pool.close()


def inspect(path: Path, rows: int, sequences: int) -> Inspection:
    """Return memory need and properties of the model at `path`, from its headers.

    For invalid files and unsupported models, the result has only a `problem`.

    Args:
        rows: number of tokens of the largest step.
        sequences: number of sequences of the largest step.
    """
    try:
        weights, parameters, config, templates = _checkpoint(path) if path.is_dir() else _gguf(path)
        settings, vision = Settings(config), has_vision(path)
        kv = min(settings.context, LEAST_CONTEXT) * _kv_position_bytes(settings, config)
    except ModelFileError as error:
        return Inspection(problem=str(error))
    except (OSError, ValueError, TypeError, ArithmeticError) as error:
        return Inspection(problem=f"{path.name}: invalid: {error}")
    step = _step_bytes(settings, config, rows, sequences)
    architecture = config.get("model_type")
    name = architecture[:_MAX_NAME_CHARS] if isinstance(architecture, str) and architecture.isprintable() else None
    tool_call, reasoning = template_abilities(templates)
    return Inspection(weights + step + kv, settings.context, name, parameters, tool_call, reasoning, vision)


def template_abilities(templates: TemplateSources) -> tuple[bool, bool]:
    """Return whether templates use `tools`, and whether they use `enable_thinking`."""
    variables = set[str]()
    for source in (templates.default, templates.tool_use):
        with suppress(TemplateError, RecursionError):  # an invalid template counts as a template without variables
            if source is not None and len(source) <= MAX_SOURCE_LENGTH:
                variables |= TemplateEnvironment().undeclared(source)
    return "tools" in variables, "enable_thinking" in variables


# Bytes of weights in memory, parameters, configuration, chat templates.
_Files = tuple[int, int | None, dict[str, Any], TemplateSources]


def _gguf(path: Path) -> _Files:
    file = GgufFile.open(path)
    tensors = file.tensors.values()
    parameters = sum(prod(tensor.shape) for tensor in tensors)
    templates = TemplateSources.in_gguf(file.metadata)
    return sum(tensor.nbytes for tensor in tensors), parameters, gguf_config(file), templates


def _checkpoint(folder: Path) -> _Files:
    config = text_config(read_json(folder / "config.json"))
    check_model_type(str(config.get("model_type")))
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated")]
    if not files:
        raise ModelFileError(f"the folder {folder.name} has no .safetensors files", advice="download the model again")
    counts = [_tensor_sizes(file) for file in files]
    weights = sum(count * _UNPACKED_BYTES.get(kind, 1) for sizes in counts for kind, count in sizes.items())
    is_packed = any(kind in UNCOUNTED for sizes in counts for kind in sizes)
    parameters = None if is_packed else sum(sizes.total() for sizes in counts)
    return weights, parameters, config, TemplateSources.in_directory(folder)


def _step_bytes(settings: Settings, config: Mapping[str, Any], rows: int, sequences: int) -> int:
    """Estimate the memory of the largest step in bytes, as `memory_request` does."""
    inner = [config.get(key) for key in ("intermediate_size", "moe_intermediate_size")]
    widest = max(settings.hidden + size for size in (*inner, 0) if isinstance(size, int))
    vocabulary = config.get("vocab_size")
    logit_rows = _LOGITS_ARRAYS * sequences + SAMPLED_ARRAYS * min(sequences, physical_cores())
    logits = logit_rows * (vocabulary if isinstance(vocabulary, int) else 0) * 4
    return _RUNTIME + max(rows, sequences) * 4 * (3 * widest + 6 * settings.hidden) + logits


def _kv_position_bytes(settings: Settings, config: Mapping[str, Any]) -> int:
    """Return the bytes of K and V of one position in all layers with attention."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != settings.layers:
        kinds = ["full_attention"] * settings.layers
    # The last layers of some models read the KV cache of earlier layers, and store no K and V themselves.
    shared = settings.positive("num_kv_shared_layers") if config.get("num_kv_shared_layers") else 0
    kv_heads = settings.positive("num_global_key_value_heads", settings.kv_heads)
    numbers = {
        "full_attention": kv_heads * settings.positive("global_head_dim", settings.head_dim),
        "sliding_attention": settings.kv_heads * settings.head_dim,
    }
    # With latent attention (MLA), one vector per position serves as both key and value.
    stored = 2 if config.get("kv_lora_rank") is None else 1
    return stored * sum(numbers.get(kind, 0) for kind in kinds[: settings.layers - shared]) * _KV_ITEM_BYTES


def _respond(body: bytes) -> bytes:
    request = msgspec.json.decode(body, type=InspectionRequest)
    with inside_sandbox.cpu_time_limit(_MAX_SECONDS):
        return msgspec.json.encode(inspect(Path(request.path), request.rows, request.sequences))


@dataclass(frozen=True)
class Description:
    """Properties of an inspected model, from its files. Unknown properties are None."""

    architecture: str  # `model_type` in a checkpoint's `config.json`, or the architecture name in a GGUF file
    weights: str  # file format, and dtype of most weights
    parameters: int | None
    # Maximum number of tokens that the engine supports. It includes the extension of a context by YaRN. It excludes the
    # extension by dual chunk attention, which the engine does not support.
    context_length: int | None
    license: str | None = None
    tools: bool | None = None  # whether the chat template and the vocabulary support tool calls
    reasoning: bool | None = None  # whether the chat template and the vocabulary support reasoning
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    problem: str = ""  # why helexa's engine cannot run the model; empty if it can


def describe(path: Path) -> Description:
    """Inspect a GGUF file or a checkpoint folder, and return its properties.

    If the engine cannot run the model, or cannot read its text files, the result has a `problem`.

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
    context, license = (file.metadata.get(key) for key in (f"{file.architecture}.context_length", "general.license"))
    config, problem = {"max_position_embeddings": context}, ""
    try:
        config = gguf_config(file)
    except ModelFileError as error:
        problem = str(error)
    return Description(
        architecture=file.architecture,
        weights=f"GGUF, {_most(sizes)}",
        parameters=sizes.total(),
        context_length=_context(config),
        license=license if isinstance(license, str) else None,
        problem=problem,
    )


def _of_checkpoint(folder: Path) -> Description:
    config = text_config(read_json(folder / "config.json"))
    sizes: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        sizes.update(_tensor_sizes(file))
    model_type, problem = config.get("model_type"), ""
    architecture = model_type if isinstance(model_type, str) else "unknown"
    try:
        check_model_type(architecture)
    except ModelFileError as error:
        problem = str(error)
    return Description(
        architecture=architecture,
        weights=f"safetensors, {_most(sizes)}",
        parameters=None if any(kind in sizes for kind in UNCOUNTED) else sizes.total(),
        context_length=_context(config),
        problem=problem,
    )


def _context(config: Mapping[str, Any]) -> int | None:
    """Return the context length that the engine supports.

    If the engine cannot run the model, return the length that the files state. None if they state no length.
    """
    stated = config.get("max_position_embeddings")
    if not isinstance(stated, int):
        return None
    try:
        return Settings(config).context
    except ModelFileError:
        return stated


def _tensor_sizes(path: Path) -> Counter[str]:
    """Return the number of elements by dtype in a safetensors file's header.

    Raises:
        ModelFileError: the file cannot be read, or its header is invalid.
    """
    sizes: Counter[str] = Counter()
    try:
        with open_model_file(path) as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = parse_json(file.read(min(length, MAX_JSON_BYTES)), path)
    except OSError as error:
        raise ModelFileError(
            f"{path.name}: cannot be read: {error.strerror or error}", advice=UNREADABLE_FILE
        ) from error
    for name, tensor in header.items():
        match tensor:
            case {"dtype": str(kind), "shape": [*shape]} if all(isinstance(size, int) for size in shape):
                sizes[kind] += prod(shape)
            case _ if name != "__metadata__":
                raise ModelFileError(
                    f"{path.name}: tensor {name[:100]!r} has an invalid header entry", advice="download the file again"
                )
            case _:
                pass
    return sizes


def _most(sizes: Counter[str]) -> str:
    return ", ".join(kind for kind, _ in sizes.most_common(1)) or "no weights"


if __name__ == "__main__":
    inside_sandbox.serve(_respond, _MAX_BYTES)
