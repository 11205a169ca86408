"""Launch Triton kernels, read GPU properties, capture steps as CUDA graphs.

The engine captures one CUDA graph per bucket (batch size), and then replays the graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helexa.neuron.ops.batch import Batch, Bucket


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **constants: Any) -> None:
    """Launch a Triton kernel with one program (thread block) per point of `grid`.

    The function does not wait until the kernel ends. If `grid` has no points, it launches nothing.

    Args:
        warps: number of warps of each program.
        stages: number of loop iterations whose memory loads are in flight at the same time.
        constants: compile-time constants of the kernel.
    """
    if all(grid):
        kernel[grid](*arguments, num_warps=warps, num_stages=stages, **constants)


@dataclass(frozen=True)
class GpuProperties:
    """Properties of one GPU."""

    capability: tuple[int, int]  # CUDA compute capability, major and minor
    shared_memory: int  # maximum bytes of shared memory per Triton program (thread block)
    processors: int  # number of multiprocessors (SMs)

    @property
    def tensor_cores(self) -> bool:
        """Whether Triton multiplies on tensor cores, from compute capability 8.0 on."""
        return self.capability >= (8, 0)

    @classmethod
    def from_device(cls, device: torch.device) -> "GpuProperties":
        """Return the properties of a CUDA device, or of a small GPU for the interpreter."""
        if device.type != "cuda":
            return cls((8, 6), 99 << 10, 2)
        properties = torch.cuda.get_device_properties(device)
        shared = getattr(
            properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
        )  # torch reports only one size for AMD GPUs
        return cls((properties.major, properties.minor), shared, properties.multi_processor_count)


# Captures the device work of a function; returns a function that repeats the work on the same memory.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


def without_capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return `function` unchanged, for devices without graph capture."""
    return function


class CudaCapture:
    """Captures CUDA graphs that share one memory pool and one result buffer.

    The result of a graph is valid until another graph runs. Separate result buffers would take memory from the pool
    that no other graph could use.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # memory pool; None before the first capture. torch has no public name for the type.
        self._results: Tensor | None = None

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that replays the captured work and returns the result.

        `function` is called twice. All results must have the same dtype and shape, except for the number of rows.
        Capture the function whose result has the most rows first, because all graphs share its result buffer.
        """
        first = function()  # compiles kernels and lets libraries allocate their workspaces
        if self._results is None or len(self._results) < len(first):
            self._results = torch.empty_like(first)
        result = self._results[: len(first)]
        del first
        graph = torch.cuda.CUDAGraph()
        # If a capture fails, `torch.cuda.graph` leaves its stream current. `torch.cuda.stream` restores the old stream.
        # The capture is limited to this thread, because a thread of NCCL queries events, which would invalidate a
        # capture of all threads.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            result.copy_(function())
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class StepGraphs:
    """The captured forward passes of a model, by bucket (batch size)."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._replays: dict[Bucket | None, Callable[[], Tensor]] = {}

    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Capture the forward pass of a bucket, with `blank`, a batch of padding rows.

        Later batches of this bucket must be at the same memory addresses as `blank`.
        """
        self._replays[blank.bucket] = self._capture(lambda: forward(blank))

    def forget(self) -> None:
        """Release all captured graphs and their memory."""
        self._replays.clear()

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """Replay the graph of the batch's bucket, else call `forward`; return the result."""
        replay = self._replays.get(batch.bucket)
        return forward(batch) if replay is None else replay()
