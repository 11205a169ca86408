"""The interface of servers to measure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from helexa.bench.identity import Build, Host, Model
from helexa.bench.store.rows import Reading
from helexa.core.errors import HelexaError


class TargetError(HelexaError):
    """A target is unreachable, returns an error, or returns an invalid response."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The current host and build of a target (server to measure)."""

    host: Host
    build: Build


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is loaded on a target.

    Attributes:
        model: name and configuration.
        capabilities: for example `text`, `vision`, `image`, `embedding`.
        context: context length in tokens, or None if unknown.
        tool_call: False if the server reports that the model does not support tool calls.
        load: body of a request that loads the model with its current settings. Empty if the server cannot load models.
    """

    model: Model
    capabilities: frozenset[str] = frozenset({"text"})
    context: int | None = None
    tool_call: bool = True
    load: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """The model's name, as used in requests."""
        return self.model.name


class Control(Protocol):
    """Management API of a server: loads and unloads models, and counts requests in flight."""

    async def in_flight(self, model: str) -> int:
        """Return the number of running and waiting requests for `model`."""
        ...

    async def unload(self, model: str) -> None:
        """Unload a model and wait until its memory is free."""
        ...

    async def load(self, spec: Mapping[str, Any]) -> None:
        """Load a model and wait until it accepts requests. `spec` is the body of the load request."""
        ...


class TargetServer(Protocol):
    """A server to measure. All methods may raise `TargetError`."""

    @property
    def control(self) -> Control | None:
        """The management API of the server, or None if the server has none."""
        ...

    @property
    def ignore_eos(self) -> bool:
        """True if the server supports the parameter `ignore_eos`.

        With this parameter, the server continues decoding after the end-of-sequence token.
        """
        ...

    async def identity(self) -> Identity:
        """Return the current host and build of the server."""
        ...

    async def models(self) -> list[ServedModel]:
        """Return the models that are loaded on the server."""
        ...

    async def readings(self, at_s: float) -> list[Reading]:
        """Return a reading of each accelerator, with `at_s` as its time.

        Empty if the server does not report readings.
        """
        ...
