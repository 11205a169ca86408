"""Chooses the device, the kernels and the quantization policy of an engine."""

import logging
from typing import Any

import torch

from helexa.neuron.engine.execution.device_errors import DeviceError
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.loading.memory_request import free_memory
from helexa.neuron.engine.ranks.cpu_binding import cpus_for
from helexa.neuron.hardware.cores import physical_cores
from helexa.neuron.ops.choice import choose
from helexa.neuron.ops.constants import MIXED
from helexa.neuron.ops.protocol import Ops
from helexa.neuron.ops.ranks.rank_group import RankGroup
from helexa.neuron.weights.checkpoint import Checkpoint
from helexa.neuron.weights.quantization.quant_form import AUTO, quant_named
from helexa.neuron.weights.quantization.quant_policy import QuantPolicy, automatic

_log = logging.getLogger("helexa.neuron.engine")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def usable_device(name: str) -> torch.device:
    """Return the torch device `name` after a test that it works. A CUDA device becomes torch's current device.

    Raises:
        DeviceError: the device cannot be used; the message says why.
    """
    try:
        device = torch.device(name)
        placed = torch.zeros(1, device=device).device  # runs a kernel; some torch builds lack a device's kernels
        if device.type == "cuda":
            device = placed  # torch requires an index, which the name `cuda` lacks
            torch.cuda.set_device(device)  # kernels launch on the current device
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]  # torch appends a list of device types
        raise DeviceError(f"device '{name}' cannot be used: {reason}") from error
    return device


def kernels_for(device: torch.device, options: EngineOptions, config: dict[str, Any], half: bool) -> Ops:
    """Return the kernels for this device, these options and this model (see `ops.choice.choose`).

    Args:
        config: the model's configuration.
        half: whether the model's activations stay within the range of float16.
    """
    kv_bits = 8 if options.kv_dtype == "int8" else 16
    x_bits = {"auto": MIXED, "int16": 16, "int8": 8}[options.activations]
    choice = choose(
        device,
        _DTYPES.get(options.dtype),
        config,
        kv_bits=kv_bits,
        x_bits=x_bits,
        half=half,
        kernels=options.kernels,
    )
    _log.info("kernels: %s (%s)", choice.ops.name, choice.reason)
    if kv_bits == 8 and choice.ops.kv_bits != 8:
        _log.warning("kv_dtype int8 needs native kernels or those of a GPU; K and V are kept in %s", choice.ops.dtype)
    return choice.ops


def policy_for(options: EngineOptions, checkpoint: Checkpoint, layers: int, ops: Ops) -> QuantPolicy:
    """Return the policy for quantization during loading: which unquantized weights are quantized, and to which format.

    Args:
        layers: number of layers of the model.
    """
    quant = quant_named(options.quant) if options.quant else ""
    if quant == AUTO:
        shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
        free_bytes = free_memory(ops.device, options)
        free_bytes = min(free_bytes, options.memory_limit_mb * 2**20 or free_bytes) * max(len(options.devices), 1)
        quant = automatic(shapes, layers, checkpoint.total_bytes, free_bytes) if ops.quantised else ""
        _log.info("quant auto, with %d MiB of memory free: %s", free_bytes >> 20, quant or "as it is")
    policy = QuantPolicy(quant, layers)
    if policy.quant and not ops.quantised:
        _log.warning("quant %s rounds weights, but these kernels keep them in %s", policy.quant, ops.dtype)
    return policy


def threads_of_rank(options: EngineOptions, rank: int) -> int:
    """Return the number of CPU threads of a rank of an engine.

    By default, a rank that is bound to CPUs has one thread per physical core of its CPUs. Ranks that are not bound
    share the physical cores evenly.
    """
    if options.threads:
        return options.threads
    own = cpus_for(options, rank)
    return physical_cores(own) if own else max(physical_cores() // options.tensor_parallel, 1)


def rank_group(options: EngineOptions, rank: int, device: torch.device) -> RankGroup:
    """Return the position of rank number `rank` among the ranks of an engine."""
    mode = options.tensor_parallel_mode
    sums = mode == "sum" or (mode == "auto" and device.type == "cuda")
    return RankGroup(rank, options.tensor_parallel, sums and options.tensor_parallel > 1)
