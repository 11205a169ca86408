"""What every target has to say of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from helexa.bench.identity import Build, Host, Model
from helexa.bench.store.rows import Reading
from helexa.core.errors import HelexaError


class TargetError(HelexaError):
    """A target cannot be reached, or does not answer as its kind does."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What runs behind a target's address right now."""

    host: Host
    build: Build


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A warm model.

    Attributes:
        capabilities: as `text`, `vision`, `image`, `embedding`.
        context: its limit in tokens, where it is known.
        tool_call: it knows how to call tools, as far as the server says.
        load: what the server is told to load it again as it is.
    """

    model: Model
    capabilities: frozenset[str] = frozenset({"text"})
    context: int | None = None
    tool_call: bool = True
    load: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """Its name in requests."""
        return self.model.name


class Control(Protocol):
    """What can be seen and done behind the API."""

    async def in_flight(self, model: str) -> int:
        """Requests for a model that run or wait."""
        ...

    async def unload(self, model: str) -> None:
        """Unload it; returns when its memory is free."""
        ...

    async def load(self, spec: Mapping[str, Any]) -> None:
        """Load a model; returns when it serves."""
        ...


class TargetServer(Protocol):
    """A server. Every method raises `TargetError`."""

    @property
    def control(self) -> Control | None:
        """What can be done behind its API, if anything."""
        ...

    @property
    def ignore_eos(self) -> bool:
        """Whether it knows how to go on until `max_tokens`."""
        ...

    async def identity(self) -> Identity:
        """What runs there."""
        ...

    async def models(self) -> list[ServedModel]:
        """Its warm models."""
        ...

    async def readings(self, at_s: float) -> list[Reading]:
        """What its accelerators say; nothing where nobody can tell."""
        ...
