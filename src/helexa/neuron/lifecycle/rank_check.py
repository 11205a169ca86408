"""How many ranks a model can be divided among on this node, and checks of the number that a load request asks for."""

from collections.abc import Sequence
from pathlib import Path

from helexa.core.errors import HelexaError, TensorParallelError
from helexa.core.fleet import Device, Discovery, alike
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.hardware.cores import usable_cpus
from helexa.neuron.hardware.discovery import discover
from helexa.neuron.ops.constants import MAX_RANKS
from helexa.neuron.weights.gguf.config import gguf_config
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.json_object import read_json
from helexa.neuron.weights.text_part import text_config

CUDA_RANKS = False
"""Whether engines can divide a model among CUDA devices. They cannot yet."""


def max_tensor_parallel(device: str, configured: int, facts: Discovery) -> int:
    """Return the largest number of ranks for which a gateway may ask this node.

    On CUDA devices, this is the largest number of devices that are alike. On CPUs, it is the number of NUMA nodes, or
    the configured number if it is larger: more ranks would be slower.

    Args:
        device: torch name of the device on which models run by default.
        configured: default number of ranks in the node's configuration.
        facts: the hardware of the machine.
    """
    if device == "cpu":
        return min(max(len(facts.numa_nodes or ()), configured, 1), _most_cpu_ranks())
    if device.startswith("cuda") and CUDA_RANKS:
        return min(max(map(len, alike(facts.devices)), default=1), MAX_RANKS)
    return 1


def check_ranks(options: EngineOptions, devices: Sequence[int]) -> None:
    """Check whether this node can run the number of ranks that the options request.

    Args:
        options: options of the engine.
        devices: device indices in the load request.

    Raises:
        TensorParallelError: the node has too few CPUs or devices, or the devices differ.
        HelexaError: the request contradicts itself.
    """
    ranks = options.tensor_parallel
    if ranks < 1:
        raise HelexaError(f"tensor_parallel is {ranks}, expected at least 1")
    if len(devices) > ranks:
        raise HelexaError(f"the request names {len(devices)} devices, but tensor_parallel is {ranks}")
    if ranks == 1:
        return
    if options.device == "cpu":
        if ranks > (most := _most_cpu_ranks()):
            raise _too_many_ranks(ranks, most, f"this node can run at most {most} ranks on its CPUs")
    elif options.device.startswith("cuda") and CUDA_RANKS:
        known = discover().devices
        _check_devices(ranks, [device for device in known if not devices or device.index in devices])
    else:
        raise _too_many_ranks(ranks, 1, "this node can divide models only among CPU processes, not among GPUs")


def check_heads(model: Path, ranks: int) -> None:
    """Check whether a model has an attention head for each of `ranks` ranks. Only the header of its file is read.

    Args:
        model: path of the model's file or folder.
        ranks: number of ranks.

    Raises:
        TensorParallelError: the model has fewer attention heads.
        ModelFileError: the model's configuration cannot be read.
    """
    if ranks == 1:
        return
    config = text_config(read_json(model / "config.json")) if model.is_dir() else gguf_config(GgufFile.open(model))
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and 0 < heads < ranks:
        raise _too_many_ranks(ranks, heads, f"{model.name} has {heads} attention heads", heads=heads)


def _check_devices(ranks: int, devices: Sequence[Device]) -> None:
    """Raise a TensorParallelError if a model cannot be divided among `ranks` of the devices."""
    groups = alike(devices)
    largest = max(map(len, groups), default=0)
    if largest < ranks:
        kinds = ", ".join(f"{len(group)} x {group[0].name}" for group in groups)
        reason = f"the devices differ: {kinds}" if len(groups) > 1 else f"the number of usable devices is {largest}"
        raise _too_many_ranks(ranks, max(largest, 1), reason)


def _most_cpu_ranks() -> int:
    return min(len(usable_cpus()), MAX_RANKS)


def _too_many_ranks(ranks: int, most: int, reason: str, **details: int) -> TensorParallelError:
    return TensorParallelError(
        f"tensor_parallel is {ranks}, but {reason}",
        tp_size=ranks,
        max_tensor_parallel=most,
        suggestion=f"set tensor_parallel to at most {most}",
        **details,
    )
