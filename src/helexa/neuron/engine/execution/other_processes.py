"""The other processes that compute a model together with the engine process."""

from typing import Protocol

from helexa.neuron.engine.execution.device_memory import DeviceMemory
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.step.step_input import StepInput
from helexa.neuron.ops.batch import Bucket


class OtherProcesses(Protocol):
    """The other ranks of this host (see `RankProcesses`), or the stages on other hosts (see `RemoteStages`)."""

    def allocate(self, request: MemoryRequest, grant: MemoryGrant, measure: bool) -> None:
        """Make all processes allocate KV caches and buffers of the granted sizes, and wait until they have done so.

        Args:
            measure: whether the processes measure the memory of the following steps.
        """
        ...

    def measured_memory(self) -> list[DeviceMemory]:
        """Return the memory that the processes have measured since `allocate`."""
        ...

    def capture(self, bucket: Bucket) -> None:
        """Make all processes capture the graph of a bucket, without waiting (see `captured`)."""
        ...

    def captured(self) -> str | None:
        """Wait for all processes. Return why a process cannot capture the graph; None if all have captured it."""
        ...

    def forget_graphs(self) -> None:
        """Make all processes release their captured graphs."""
        ...

    def run(self, step: StepInput) -> None:
        """Make all processes compute a step."""
        ...

    def clear(self, pages: list[int]) -> None:
        """Make all processes set the contents of KV pages to zero."""
        ...

    def touch_caches(self) -> None:
        """Make all processes write to their whole KV caches."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...
