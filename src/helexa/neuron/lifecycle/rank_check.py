"""Checks whether this node can run the number of ranks that a load request asks for."""

from collections.abc import Sequence

from helexa.core.errors import HelexaError
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.hardware.cores import usable_cpus


def check_ranks(options: EngineOptions, devices: Sequence[int]) -> None:
    """Raise a HelexaError if this node cannot run the number of ranks that the options request.

    Args:
        devices: device indices in the load request.
    """
    ranks = options.tensor_parallel
    if ranks < 1:
        raise HelexaError(f"tensor_parallel is {ranks}, expected at least 1")
    if len(devices) > ranks:
        raise HelexaError(f"the request names {len(devices)} devices, but tensor_parallel is {ranks}")
    if options.device == "cpu" and ranks > usable_cpus():
        raise HelexaError(f"tensor_parallel is {ranks}, but this node has {usable_cpus()} CPUs")
    if options.device != "cpu" and ranks > 1:
        raise HelexaError(
            f"tensor_parallel is {ranks}, but this node can divide models only among CPU processes, not among GPUs"
        )
