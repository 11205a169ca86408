"""The protocol of targets. A target is a server or a private engine that runs a model."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from helexa.generation.completion import Delta, FinishReason, Usage
from helexa.generation.request import Request

OnProgress = Callable[[str, int, int], None]
"""Called with a stage such as `download` or `weights`, the bytes done, and the total bytes (0: unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """End of a complete answer.

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
    """Event of an answer: all pieces before this event were reasoning, not text."""


Event = Delta | WasThought | End


class Target(Protocol):
    """One model at one server or private engine."""

    @property
    def name(self) -> str:
        """Description of the target for display."""
        ...

    @property
    def model(self) -> str:
        """Id of the model at the target."""
        ...

    @property
    def width(self) -> int:
        """Number of requests that the target runs well concurrently; known once the target is open."""
        ...

    async def open(self, on_progress: OnProgress | None = None, holder: object = None) -> None:
        """Load the model, unless it is already loaded.

        Args:
            on_progress: receives the progress of the load.
            holder: object that keeps the model loaded until `close`; None for a single request.

        Raises:
            HelexaError: the model could not be loaded or fetched.
        """
        ...

    def run(self, request: Request) -> AsyncGenerator[Event, None]:
        """Run a request: yield the pieces of the answer as events, the last of which is `End`.

        Closing the generator cancels the request.

        Raises:
            GenerationError: the request failed.
        """
        ...

    async def close(self, holder: object) -> None:
        """Remove `holder` from the objects that keep the model loaded. Without holders, the model is unloaded."""
        ...
