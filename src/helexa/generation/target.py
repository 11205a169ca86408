"""The interface of targets.

A target is a model on a server, or in an engine that the library starts for itself.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from helexa.generation.completion import Delta, FinishReason, Usage
from helexa.generation.request import Request
from helexa.generation.tools import ToolCallDelta

OnProgress = Callable[[str, int, int], None]
"""Called with a stage such as `download` or `weights`, the bytes done, and the total bytes (0: unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """An event of a target: the last event of a complete response.

    Attributes:
        reason: finish reason.
        model: id of the model.
        usage: token counts.
        prefill_s, decode_s: durations measured by the engine, or None if unknown.
        device, dtype: device and data type of the computation, or None if unknown.
    """

    reason: FinishReason
    model: str
    usage: Usage = field(default_factory=Usage)
    prefill_s: float | None = None
    decode_s: float | None = None
    device: str | None = None
    dtype: str | None = None


class WasThought:
    """An event of a target: all text before this event was reasoning."""


Event = Delta | ToolCallDelta | WasThought | End


class Target(Protocol):
    """One model on a server or in a private engine, which runs requests."""

    @property
    def name(self) -> str:
        """Description of the server or the private engine for display."""
        ...

    @property
    def model(self) -> str:
        """Id of the model on the server or in the private engine."""
        ...

    @property
    def slow_reason(self) -> str | None:
        """Why the model is slower than possible on this machine, and what to do.

        None if no reason is known.
        """
        ...

    @property
    def width(self) -> int:
        """Number of requests that should run concurrently for good throughput.

        Valid only after `open`.
        """
        ...

    async def open(self, on_progress: OnProgress | None = None, holder: object = None) -> None:
        """Load the model if it is not already loaded.

        Args:
            on_progress: callback that receives the progress of the load.
            holder: object that needs the model. The model stays loaded until `close` is called with the same object.
                None if the model is needed only for a single request.

        Raises:
            HelexaError: the model could not be downloaded or loaded.
        """
        ...

    def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Run a request and yield the events of the response. The last event is `End`.

        The model must be loaded; call `open` first. Closing the generator cancels the request.

        Raises:
            GenerationError: the request failed.
        """
        ...

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return an embedding with the L2 norm 1 for each text. Call `open` first.

        Raises:
            GenerationError: the request failed.
        """
        ...

    async def close(self, holder: object) -> None:
        """Tell the target that `holder` no longer needs the model.

        If no other `holder` that was passed to `open` still needs the model, the model is unloaded.
        """
        ...
