"""The other processes that compute a model together with the engine process."""

from collections.abc import Sequence
from typing import Protocol

from helexa.neuron.engine.execution.step_memory import DeviceMemory
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.kv_cache_and_prefix_hashes import CacheKind
from helexa.neuron.engine.step_input_and_graph_sizes import StepInput
from helexa.neuron.ops.batch import Bucket


class OtherProcesses(Protocol):
    """The other ranks (`RankProcesses`) or stages on other hosts (`RemoteStages`)."""

    @property
    def reads_caches(self) -> bool:
        """Whether `read_cache` and `write_cache` work. Over a network, they do not."""
        ...

    def read_cache(self, kind: CacheKind, index: int) -> list[bytes]:
        """Return each process's part of a KV page or state slot (see `Runner.read_cache`)."""
        ...

    def write_cache(self, kind: CacheKind, index: int, parts: Sequence[memoryview]) -> None:
        """Write each process's part of a KV page or state slot (`Runner.write_cache`)."""
        ...

    def allocate(self, request: MemoryRequest, grant: MemoryGrant, measure: bool) -> None:
        """Allocate KV caches and buffers of the granted sizes in all processes, and wait."""
        ...

    def measured_memory(self) -> list[DeviceMemory]:
        """Return the memory measured since `allocate` with `measure`; stages measure none."""
        ...

    def capture(self, bucket: Bucket) -> None:
        """Start the capture of a bucket's graph in all processes (see `captured`)."""
        ...

    def captured(self) -> str | None:
        """Wait for the captures; return why one failed, or None if all succeeded."""
        ...

    def forget_graphs(self) -> None:
        """Tell all processes to release their captured graphs; do not wait."""
        ...

    def run(self, step: StepInput) -> None:
        """Send a step to all processes, which compute it while this process goes on."""
        ...

    def clear(self, pages: list[int]) -> None:
        """Tell all processes to set KV pages to zero before their next step; do not wait."""
        ...

    def touch_caches(self) -> None:
        """Tell all processes to zero their whole KV caches, which allocates the memory."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...
