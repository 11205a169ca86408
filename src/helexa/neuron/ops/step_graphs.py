"""Steps of decoding as graphs of the device: recorded once for each bucket, and run again as one."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from helexa.neuron.engine.batch import Batch, Bucket


class Capture(Protocol):
    """Records what a function has the device do."""

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What does the same again, on the same memory, and returns what the function returned."""
        ...


def again(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A recording where there is nothing to record with: the function itself, with all that it has closed over."""
    return function


class CudaCapture:
    """Records CUDA graphs; they share their memory, so one's result is good until another one runs."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's type for it has no public name

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Capture`."""
        function()  # compiles kernels, and lets libraries take what they keep
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class StepGraphs:
    """Recordings of forward passes by bucket."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._replays: dict[Bucket | None, Callable[[], Tensor]] = {}

    def record(self, forward: Callable[[Batch], Tensor], blank: Batch) -> None:
        """Record a pass over a batch none of whose rows stands for anything; later ones lie where it lies."""
        self._replays[blank.bucket] = self._capture(lambda: forward(blank))

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """What was recorded for a batch's bucket, for the batch that lies there now; else the pass itself."""
        replay = self._replays.get(batch.bucket)
        return forward(batch) if replay is None else replay()
