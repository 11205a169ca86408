"""Decisions of the server before an engine loads: options, quantization, ranks."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from helexa.core.errors import HelexaError, ModelFileError, TensorParallelError
from helexa.core.load_options import LoadOptions
from helexa.core.logs import quoted
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.hardware.cpus import usable_cpus
from helexa.neuron.hardware.nvidia_gpus import accelerators
from helexa.neuron.ops.kernel_header import MAX_RANKS
from helexa.neuron.options import TorchOptions
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.model_file import read_json, text_config
from helexa.neuron.weights.quantization_formats import has_more_bits, quant_named
from helexa.neuron.weights.vision_config import has_vision

if TYPE_CHECKING:  # imported at run time only where needed: in servers, or while an engine loads
    from helexa.core.node_reports import Device, Discovery
    from helexa.neuron.text.model_text import ModelText
    from helexa.neuron.vision.model_vision import ModelVision


log = logging.getLogger(__name__)

_HARNESSES = ("torch", "candle")  # `candle` was the engine of helexa's first version; load requests may still name it
_NO_PARSER = "none"


class CudaUnavailableError(HelexaError):
    """A model needs a CUDA device, but the driver does not work."""


def engine_options(spec: LoadOptions, config: TorchOptions, device: str, group_hosts: int) -> EngineOptions:
    """Return the options of the engine for a load request.

    Args:
        spec: the load request, whose options replace those of `config`.
        device: the node's device, such as `cpu` or `cuda:0`.
        group_hosts: number of hosts in the node's host group; 1 if it has no group.

    Raises:
        CudaUnavailableError: the device is a GPU, and the driver does not work.
        TensorParallelError, HelexaError: the node cannot fulfill the request. The message says why.
    """
    if spec.harness not in _HARNESSES:
        raise HelexaError(f"unknown harness '{spec.harness}'; leave harness out, or set it to 'torch'")
    devices = spec.devices or []
    # On a node without CUDA, device indices are ignored, because gateways also send them to such nodes.
    chosen = f"cuda:{devices[0]}" if devices and device.startswith("cuda") else device
    if chosen.startswith("cuda") and (reason := accelerators().unavailable):
        raise CudaUnavailableError(f"no model can run on {chosen}: {reason}")
    options = config.engine_options(chosen)
    if spec.tensor_parallel is not None:
        options = msgspec.structs.replace(options, tensor_parallel=spec.tensor_parallel)
    if spec.max_image_tokens is not None:
        options = msgspec.structs.replace(options, max_image_tokens=spec.max_image_tokens)
    hosts = _hosts_for(spec.pipeline_parallel or config.pipeline_parallel, group_hosts)
    options = msgspec.structs.replace(options, mmproj=spec.mmproj or "", pipeline_parallel=hosts)
    ranks = devices_of_ranks(options, devices, accelerators().devices)
    return msgspec.structs.replace(options, device=ranks[0], devices=ranks) if ranks else options


def check_tool_parser(name: str | None) -> None:
    """Raise `HelexaError` unless `name` is None, `none` or a tool-call format's name."""
    if name is None or name == _NO_PARSER:
        return
    from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS

    if name not in TOOL_CALL_FORMATS:
        known = ", ".join([*TOOL_CALL_FORMATS, _NO_PARSER])
        raise HelexaError(f"unknown tool_parser '{name[:100]}'; known parsers: {known}")


def text_of(path: Path, spec: LoadOptions, chat_template: Path | None = None) -> "ModelText":
    """Read tokenizer, chat template and output formats of the model to load.

    A tool-call parser in `spec` replaces the tool-call format that the files imply. Sampling parameters in `spec`
    replace the sampling parameters in the files. The function blocks, and starts the tokenizer's sandbox process.

    Args:
        chat_template: file with a template that replaces the chat templates in the model's files, or None.
    """
    from helexa.neuron.text.tokenizer_sandbox import TokenizerSandbox

    sandbox = TokenizerSandbox(path)
    settings = sandbox.settings()
    # Imported only now, to save time: while the sandbox process read the files, another thread may have imported these
    # modules.
    from helexa.neuron.builtin_models import recommended_sampling
    from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
    from helexa.neuron.text.model_text import ModelText

    text = ModelText.of(settings, sandbox, None if chat_template is None else _template(chat_template))
    stated = (
        {}
        if spec.sampling is None
        else {name: value for name, value in vars(spec.sampling).items() if value is not None}
    )
    text.sampling_defaults = {**recommended_sampling(spec), **text.sampling_defaults}
    text.sampling_defaults |= {name: value for name, value in stated.items() if value is not None}
    if spec.tool_parser is not None:
        text.output_format.tool_call_format = TOOL_CALL_FORMATS.get(spec.tool_parser)
    # Starts the template process and tokenizes once, because both would delay the first request.
    _ = text.capabilities
    for framed in (False, True):
        text.output_format.end_of_reasoning(framed=framed)
    return text


def _template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "the file is not UTF-8 text"
        raise ModelFileError(
            f"{file}: the chat template cannot be read: {reason}", advice="correct chat_template"
        ) from None


def sees_images(path: Path, options: EngineOptions) -> bool:
    """Return whether the node can use images with the model to load."""
    return options.pipeline_parallel == 1 and has_vision(path, Path(options.mmproj) if options.mmproj else None)


def vision_of(path: Path, text: "ModelText", options: EngineOptions) -> "ModelVision | None":
    """Return the image preparation of the model to load; None without a vision part."""
    from helexa.neuron.vision.model_vision import ModelVision  # imports numpy and Pillow, which text models do not need

    mmproj = Path(options.mmproj) if options.mmproj else None
    return ModelVision.open(path, text.tokenizer.token_id, options.max_image_tokens, mmproj)


def load_time_quant(model_id: str, path: Path, quant: str | None) -> str:
    """Return the quantization that the engine applies at the load, or "".

    The result is empty for GGUF files, which are loaded unchanged, because they are already quantized.

    Args:
        quant: quantization that the load request names; None or empty for none.
    """
    if not quant:
        return ""
    if path.suffix.lower() != ".gguf":
        name = quant_named(quant)
        if has_more_bits(quant):
            log.warning(
                "weights are larger than requested model=%s quant=%s loaded_as=%s; a smaller quant needs a GGUF file",
                quoted(model_id),
                quant,
                name,
            )
        return name
    if quant.lower().replace("_", "") not in path.name.lower().replace("_", ""):
        log.warning(
            "quant not applied model=%s path=%s quant=%s; a GGUF file keeps the quantization of its weights",
            quoted(model_id),
            quoted(path),
            quant,
        )
    return ""


def max_tensor_parallel(device: str, configured: int, facts: "Discovery") -> int:
    """Return the largest number of ranks that a gateway may request for a load."""
    # With CUDA, this is the largest number of devices of one kind. On CPUs, it is the number of NUMA nodes, or the
    # configured number if that is larger. With more ranks than NUMA nodes, a model would be slower.
    if device == "cpu":
        return min(max(len(facts.numa_nodes or ()), configured, 1), _most_cpu_ranks())
    if device.startswith("cuda"):
        from helexa.core.node_reports import alike

        return min(max(map(len, alike(facts.devices)), default=1), MAX_RANKS)
    return 1


def _hosts_for(requested: int | None, hosts: int) -> int:
    """Return the number of hosts that compute a model to load together.

    Args:
        requested: the number in the load request or in the node's configuration; None for all hosts of the group.
        hosts: number of hosts in the node's host group; 1 if it has no group.

    Raises:
        HelexaError: `requested` is less than 1 or greater than `hosts`.
    """
    if requested is not None and not 1 <= requested <= hosts:
        where = "this node has no host group" if hosts == 1 else f"the host group has {hosts} hosts"
        raise HelexaError(f"pipeline_parallel is {requested}, but {where}; set it to at most {hosts}")
    return hosts if requested is None else requested


def devices_of_ranks(options: EngineOptions, requested: Sequence[int], visible: "Sequence[Device]") -> list[str]:
    """Return each rank's torch device; empty if all ranks run on `options.device`.

    Args:
        requested: device indices in the load request; empty for the first visible devices that are alike.

    Raises:
        TensorParallelError: the node has too few CPUs or devices, or the devices differ.
        HelexaError: `requested` names a wrong number of devices, an unknown device or a device twice.
    """
    ranks = options.tensor_parallel
    if ranks < 1:
        raise HelexaError(f"tensor_parallel is {ranks}; set it to 1, or to the number of devices to use")
    if len(requested) > ranks:
        raise HelexaError(
            f"the request names {len(requested)} devices, but tensor_parallel is {ranks}; name {ranks} devices or none"
        )
    if ranks == 1:
        return []
    if options.device == "cpu":
        if ranks > (most := _most_cpu_ranks()):
            raise _too_many_ranks(ranks, most, f"this node can run at most {most} ranks on its CPUs")
        return []
    if not options.device.startswith("cuda"):
        raise _too_many_ranks(ranks, 1, "ranks run only on CPUs and CUDA devices")
    return [f"cuda:{device.index}" for device in _chosen(ranks, requested, visible)]


def check_heads(model: Path, ranks: int) -> None:
    """Check before a load that the model has an attention head for each rank.

    Raises:
        TensorParallelError: the model has fewer attention heads than `ranks`.
        ModelFileError: the model's configuration cannot be read.
    """
    if ranks == 1:
        return
    from helexa.neuron.weights.gguf.config import gguf_config

    config = text_config(read_json(model / "config.json")) if model.is_dir() else gguf_config(GgufFile.open(model))
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and 0 < heads < ranks:
        raise _too_many_ranks(ranks, heads, f"{model.name} has {heads} attention heads", heads=heads)


def _chosen(ranks: int, requested: Sequence[int], visible: "Sequence[Device]") -> "Sequence[Device]":
    """Return a device per rank, all with the same name and compute capability."""
    if requested and len(requested) != ranks:
        raise HelexaError(
            f"the request names {len(requested)} devices, but tensor_parallel is {ranks}; name {ranks} devices or none"
        )
    if twice := [index for position, index in enumerate(requested) if index in requested[:position]]:
        raise HelexaError(f"the request names device {twice[0]} twice; name each device once")
    by_index = {device.index: device for device in visible}
    if missing := [index for index in requested if index not in by_index]:
        raise HelexaError(f"this node has no device cuda:{missing[0]}; its devices are {sorted(by_index)}")
    candidates = [by_index[index] for index in requested] or visible
    from helexa.core.node_reports import alike

    groups = alike(candidates)
    largest = max(groups, key=len, default=[])
    if len(largest) < ranks:
        kinds = ", ".join(f"{len(group)} x {group[0].name}" for group in groups)
        usable = f"the number of usable devices is {len(largest)}"
        reason = f"the devices differ: {kinds}" if len(groups) > 1 else usable
        raise _too_many_ranks(ranks, max(len(largest), 1), reason)
    return candidates if requested else largest[:ranks]


def _most_cpu_ranks() -> int:
    return min(len(usable_cpus()), MAX_RANKS)


def _too_many_ranks(ranks: int, most: int, reason: str, **details: int) -> TensorParallelError:
    return TensorParallelError(
        f"tensor_parallel is {ranks}, but {reason}; set it to at most {most}",
        tp_size=ranks,
        max_tensor_parallel=most,
        suggestion=f"set tensor_parallel to at most {most}",
        **details,
    )
