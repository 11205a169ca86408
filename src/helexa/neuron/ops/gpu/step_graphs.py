"""CUDA graphs of decode steps. The engine captures one graph per bucket (batch size), and then replays the graphs."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from helexa.neuron.ops.batch import Batch, Bucket


class Capture(Protocol):
    """Interface of functions that capture the device work of another function as a graph."""

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that repeats the device work of `function` on the same memory, and returns its result."""
        ...


def without_capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return `function` unchanged; takes the place of `CudaCapture` on devices without graph capture."""
    return function


class CudaCapture:
    """Captures CUDA graphs that share one memory pool and one result buffer.

    The result of a graph is valid until another graph runs. Separate result buffers would take memory from the pool
    that no other graph could use.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # torch's type has no public name
        self._results: Tensor | None = None

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that replays the captured work of `function`, and returns the result.

        The results of all captured functions must have the same dtype and shape, except for the number of rows. Capture
        the function whose result has the most rows first, because all graphs share its result buffer.
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
        """Capture the forward pass of a bucket, with a batch `blank` that contains only padding rows.

        Later batches of this bucket must be at the same memory addresses as `blank`.
        """
        self._replays[blank.bucket] = self._capture(lambda: forward(blank))

    def forget(self) -> None:
        """Release all captured graphs and their memory."""
        self._replays.clear()

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """Return the result of a forward pass: replay the graph of the batch's bucket, or else call `forward`."""
        replay = self._replays.get(batch.bucket)
        return forward(batch) if replay is None else replay()
