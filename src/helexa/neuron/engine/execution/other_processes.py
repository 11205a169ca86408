"""The other processes that compute a model together with the engine process."""

from typing import Protocol

from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.step.step_input import StepInput


class OtherProcesses(Protocol):
    """The other ranks of this host (see `RankProcesses`), or the stages on other hosts (see `RemoteStages`)."""

    def allocate(self, request: MemoryRequest, grant: MemoryGrant) -> None:
        """Make all processes allocate KV caches and buffers of the granted sizes, and wait until they have done so."""
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
