"""Where prompts are answered: what a server and a private engine have in common."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from helexa.generation.completion import Delta, FinishReason, Usage
from helexa.generation.request import Request

OnProgress = Callable[[str, int, int], None]
"""Told of a stage such as `download` or `weights`, of the bytes done, and of those in all (0: unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The answer is complete.

    Attributes:
        prefill_s, decode_s: as the engine measured them, None where it does not say.
    """

    reason: FinishReason
    model: str
    usage: Usage = field(default_factory=Usage)
    prefill_s: float | None = None
    decode_s: float | None = None
    device: str | None = None
    dtype: str | None = None


class WasThought:
    """All pieces so far were reasoning, as shows only now."""


Event = Delta | WasThought | End


class Target(Protocol):
    """One model at one place."""

    @property
    def name(self) -> str:
        """The place, for people."""
        ...

    @property
    def model(self) -> str:
        """The id that the model goes by there."""
        ...

    @property
    def width(self) -> int:
        """Requests that are best sent at once, once it is open."""
        ...

    async def open(self, on_progress: OnProgress | None = None, holder: object = None) -> None:
        """Have the model ready; does nothing if it is.

        Args:
            holder: who wants it to stay until `close`; None for whoever asks once.

        Raises:
            HelexaError: it cannot be had.
        """
        ...

    def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """Deltas, and `End` as the last event; closing the generator ends the answer where it is generated.

        Raises:
            GenerationError: there is none, or no more of it.
        """
        ...

    async def close(self, holder: object) -> None:
        """Let the model go, unless somebody else holds it."""
        ...
