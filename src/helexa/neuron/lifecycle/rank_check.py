"""How many ranks a model can be divided among on this node, and the devices of the ranks of a load request."""

from collections.abc import Sequence
from pathlib import Path

from helexa.core.errors import HelexaError, TensorParallelError
from helexa.core.fleet import Device, Discovery, alike
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.hardware.cores import usable_cpus
from helexa.neuron.ops.constants import MAX_RANKS
from helexa.neuron.weights.gguf.config import gguf_config
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.json_object import read_json
from helexa.neuron.weights.text_part import text_config


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
    if device.startswith("cuda"):
        return min(max(map(len, alike(facts.devices)), default=1), MAX_RANKS)
    return 1


def devices_of_ranks(options: EngineOptions, requested: Sequence[int], visible: Sequence[Device]) -> list[str]:
    """Return the torch device of each rank; an empty list if all ranks run on the device in `options`.

    Args:
        options: options of the engine: the number of ranks, and the kind of device.
        requested: device indices in the load request; empty for the first visible devices that are alike.
        visible: the CUDA devices of this node.

    Raises:
        TensorParallelError: the node has too few CPUs or devices, or the devices differ.
        HelexaError: the request contradicts itself.
    """
    ranks = options.tensor_parallel
    if ranks < 1:
        raise HelexaError(f"tensor_parallel is {ranks}, expected at least 1")
    if len(requested) > ranks:
        raise HelexaError(f"the request names {len(requested)} devices, but tensor_parallel is {ranks}")
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


def _chosen(ranks: int, requested: Sequence[int], visible: Sequence[Device]) -> Sequence[Device]:
    """Return the devices of the ranks, which must be alike."""
    if requested and len(requested) != ranks:
        raise HelexaError(f"the request names {len(requested)} devices, but tensor_parallel is {ranks}")
    if twice := [index for position, index in enumerate(requested) if index in requested[:position]]:
        raise HelexaError(f"the request names device {twice[0]} twice")
    by_index = {device.index: device for device in visible}
    if missing := [index for index in requested if index not in by_index]:
        raise HelexaError(f"this node has no device cuda:{missing[0]}")
    candidates = [by_index[index] for index in requested] or visible
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
        f"tensor_parallel is {ranks}, but {reason}",
        tp_size=ranks,
        max_tensor_parallel=most,
        suggestion=f"set tensor_parallel to at most {most}",
        **details,
    )
