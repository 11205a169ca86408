"""Decode steps as captured GPU graphs: captured once per bucket, then replayed."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from helexa.neuron.ops.batch import Batch, Bucket


class Capture(Protocol):
    """Function that captures device work."""

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that repeats the work of `function` on the same memory and returns its result."""
        ...


def without_capture(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return `function` unchanged, for devices without graph capture."""
    return function


class CudaCapture:
    """Capture of CUDA graphs that share one memory pool.

    The result of a graph is valid until another graph runs. All results share one buffer. Separate result buffers would
    take memory from the pool that no other graph could use.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # torch's type has no public name
        self._results: Tensor | None = None

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that repeats the captured work of `function`.

        Results differ only in their length. Capture the longest result first.
        """
        first = function()  # compiles kernels and lets libraries allocate their workspaces
        if self._results is None or len(self._results) < len(first):
            self._results = torch.empty_like(first)
        result = self._results[: len(first)]
        del first
        graph = torch.cuda.CUDAGraph()
        # If a capture fails, `graph` leaves its own stream as the current stream.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=self._pool):
            result.copy_(function())
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class StepGraphs:
    """Captured forward passes by bucket."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._replays: dict[Bucket | None, Callable[[], Tensor]] = {}

    def capture(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Capture a pass over `blank`, a batch of padding rows; later batches must use the same memory."""
        self._replays[blank.bucket] = self._capture(lambda: forward(blank))

    def forget(self) -> None:
        """Release all captured graphs and their memory."""
        self._replays.clear()

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """Replay the captured graph of the batch's bucket on the batch's memory, or run the pass directly."""
        replay = self._replays.get(batch.bucket)
        return forward(batch) if replay is None else replay()
