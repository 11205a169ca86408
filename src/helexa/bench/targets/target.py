"""The protocol of targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from helexa.bench.identity import Build, Host, Model
from helexa.bench.store.rows import Reading
from helexa.core.errors import HelexaError


class TargetError(HelexaError):
    """A target is unreachable, or its answer is invalid."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The present host and build of a target."""

    host: Host
    build: Build


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A warm model.

    Attributes:
        model: name and configuration.
        capabilities: for example `text`, `vision`, `image`, `embedding`.
        context: context size in tokens, or None if unknown.
        tool_call: whether the model supports tool calls, according to the server.
        load: body of the request that loads the model with the same settings.
    """

    model: Model
    capabilities: frozenset[str] = frozenset({"text"})
    context: int | None = None
    tool_call: bool = True
    load: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """Name of the model in requests."""
        return self.model.name


class Control(Protocol):
    """Inspection and control of a server outside the API."""

    async def in_flight(self, model: str) -> int:
        """Return the number of running and waiting requests of a model."""
        ...

    async def unload(self, model: str) -> None:
        """Unload a model; return when its memory is free."""
        ...

    async def load(self, spec: Mapping[str, Any]) -> None:
        """Load a model; return when it serves."""
        ...


class TargetServer(Protocol):
    """A server. Every method raises `TargetError`."""

    @property
    def control(self) -> Control | None:
        """Control of the server, or None."""
        ...

    @property
    def ignore_eos(self) -> bool:
        """Whether the server supports `ignore_eos`."""
        ...

    async def identity(self) -> Identity:
        """Return the present host and build."""
        ...

    async def models(self) -> list[ServedModel]:
        """Return the warm models."""
        ...

    async def readings(self, at_s: float) -> list[Reading]:
        """Return readings of the accelerators; empty if unknown."""
        ...
