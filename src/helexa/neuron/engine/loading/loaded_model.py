"""A model whose weights are loaded in all processes, as rank 0 controls it."""

from collections.abc import Sequence
from dataclasses import dataclass

from helexa.neuron.engine.execution.device_memory import DeviceMemory
from helexa.neuron.engine.execution.other_processes import OtherProcesses
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions, MemoryGrant, MemoryRequest
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.protocol import Ops


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, but without a KV cache.

    Attributes:
        model: the part of rank 0.
        ops: the kernels with which the model was built.
        others: the other ranks of this host, and the stages on other hosts.
    """

    model: Decoder
    ops: Ops
    options: EngineOptions
    others: Sequence[OtherProcesses] = ()

    def runner(self, request: MemoryRequest, grant: MemoryGrant, measure: bool = False) -> Runner:
        """Allocate the KV caches of all processes, and return the runner of this process.

        Args:
            request: the memory request, from which the runner takes sizes.
            grant: the memory grant: number of KV pages, sequences and snapshots to allocate.
            measure: whether the other processes measure the memory of the following steps (see `memory_of_others`).
        """
        for processes in self.others:
            processes.allocate(request, grant, measure)
        return Runner(self.model, self.ops, self.options, request, grant, self.others)

    def memory_of_others(self) -> list[DeviceMemory]:
        """Return the memory that the other processes have measured since `runner` was called with `measure`."""
        return [memory for processes in self.others for memory in processes.measured_memory()]
