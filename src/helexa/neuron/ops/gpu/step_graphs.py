"""Steps of decoding as graphs of the device: recorded once for each bucket, and run again as one."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from helexa.neuron.ops.batch import Batch, Bucket


class Capture(Protocol):
    """Records what a function has the device do."""

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What does the same again, on the same memory, and returns what the function returned."""
        ...


def again(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A recording where there is nothing to record with: the function itself, with all that it has closed over."""
    return function


class CudaCapture:
    """Records CUDA graphs; they share their memory, so one's result is good until another one runs.

    All results lie at one place, one over the other: each would keep memory of its own otherwise, as no other graph may
    use what is held.
    """

    def __init__(self) -> None:
        self._pool: Any = None  # torch's type for it has no public name
        self._results: Tensor | None = None

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Capture`; results have the same shape but for their length, the longest best comes first."""
        first = function()  # compiles kernels, and lets libraries take what they keep
        if self._results is None or len(self._results) < len(first):
            self._results = torch.empty_like(first)
        result = self._results[: len(first)]
        del first
        graph = torch.cuda.CUDAGraph()
        # Where a recording fails, `graph` leaves its own stream behind as the current one.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=self._pool):
            result.copy_(function())
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

    def forget(self) -> None:
        """Give up all recordings, and their memory."""
        self._replays.clear()

    def run(self, forward: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """What was recorded for a batch's bucket, for the batch that lies there now; else the pass itself."""
        replay = self._replays.get(batch.bucket)
        return forward(batch) if replay is None else replay()
