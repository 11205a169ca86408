"""Selects where a request runs. The first available choice is used:

1. the configured server,
2. a server on this machine that has the model loaded,
3. a private engine.

A private engine is an engine that the library starts for itself, without a server.
"""

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helexa.core.errors import explained_extras
from helexa.generation import environment
from helexa.generation.early_start import has_engine_packages
from helexa.generation.environment import LOCAL_URLS
from helexa.generation.errors import EngineError, InvalidRequestError
from helexa.generation.target import Target
from helexa.neuron.engine_client.process_and_standby import WarmStandby
from helexa.neuron.processes.sandbox import end_spares, start_spare
from helexa.neuron.text import TEMPLATE_PROCESS, TOKENIZER_PROCESS

if TYPE_CHECKING:
    from helexa.generation.private import PrivateEngines
    from helexa.generation.remote import ServerClient

PRIVATE = "private"
"""Value of `target` that selects a private engine."""

DEFAULT_MODEL = "helexa/small"


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """The caller's choice of a model, and of what runs it.

    If a field is None, its environment variable is read, or a default is used.

    Attributes:
        model: `org/name`, `scheme:name`, or a path.
        target: URL of a gateway or a node, or `private` for a private engine.
        device, dtype, quant, context_length: settings of a private engine. If one of them is set, a private engine is
            used, unless `target` or the environment variable names a server.
    """

    model: str | None = None
    target: str | None = None
    device: str | None = None
    dtype: str | None = None
    quant: str | None = None
    context_length: int | None = None

    @property
    def wanted_model(self) -> str | None:
        """The model that the caller or the environment selects, or None if neither does."""
        return self.model or environment.text(environment.MODEL)

    @property
    def url(self) -> str | None:
        """URL of the server that the caller or the environment selects.

        None if neither selects a server.
        """
        value = self.target or environment.text(environment.BASE_URL)
        return None if value == PRIVATE else value

    @property
    def key(self) -> tuple[object, ...]:
        """Key under which `Targets` caches the selected server or engine.

        The key includes the values of the environment variables that select a model or a server.
        """
        return (self, self.wanted_model, self.url, self.is_private)

    @property
    def is_private(self) -> bool:
        """Whether the model must run in a private engine, not on a server."""
        is_set = self.has_engine_settings or environment.text(environment.DEVICE) is not None
        return self.target == PRIVATE or (self.url is None and is_set)

    @property
    def has_engine_settings(self) -> bool:
        """Whether the caller chose a setting that only private engines have.

        A private engine is an engine that this library starts for itself.
        """
        return bool(self.device or self.dtype or self.quant or self.context_length is not None)


class Targets:
    """The servers and private engines that this process uses.

    A server is connected, and a private engine is started, at its first use.

    All methods must be called in the same event loop.
    """

    def __init__(self) -> None:
        self._cached: dict[tuple[object, ...], Target] = {}
        self._engines: dict[tuple[str | None, str | None, int | None], PrivateEngines] = {}
        self._remotes: dict[str, ServerClient] = {}
        self._lock = asyncio.Lock()
        self._standby = WarmStandby()

    async def find(self, location: ModelLocation) -> Target:
        """Return the target of the chosen model: on a server, or in a private engine.

        Raises:
            HelexaError: the choice is invalid, or the server has no models or cannot be reached.
        """
        async with self._lock:
            if (target := self._cached.get(location.key)) is not None:
                return target
            if location.url is None and not location.is_private:
                # Do not cache the result: local servers may stop, and later requests then need another target.
                for url in LOCAL_URLS:
                    if (target := await self._remote(url).loaded(location.wanted_model)) is not None:
                        return target
            target = self._cached[location.key] = await self._choose(location)
            return target

    async def close(self) -> None:
        """Close the connections to all servers, and end all private engines."""
        engines, self._engines = list(self._engines.values()), {}
        remotes, self._remotes = list(self._remotes.values()), {}
        self._cached.clear()
        await self._standby.close()
        end_spares()
        for remote in remotes:
            remote.close()
        await asyncio.gather(*(private_engines.close() for private_engines in engines), return_exceptions=True)

    async def _choose(self, location: ModelLocation) -> Target:
        model = location.wanted_model
        if location.url is not None and not location.is_private:
            if location.has_engine_settings:
                raise InvalidRequestError(
                    "device, dtype, quant and the context length cannot be set for the server at "
                    f"{location.url}; leave these settings out, or set no server"
                )
            return await self._remote(location.url).target(model)
        try:
            if not self._engines and has_engine_packages():
                # These processes start while this process imports the modules of private engines.
                await self._standby.begin()
                for module in (TOKENIZER_PROCESS, TEMPLATE_PROCESS):
                    start_spare(module)
            return self._private_engines(location).target(model or DEFAULT_MODEL, location.quant)
        except BaseException as error:
            await self._standby.close()
            end_spares()
            if isinstance(error, OSError):
                reason = error.strerror or error
                raise EngineError(
                    f"no engine can start: {reason}; try again, or free memory", retryable=True
                ) from error
            raise

    def _remote(self, url: str) -> "ServerClient":
        from helexa.generation.remote import ServerClient

        if url not in self._remotes:
            self._remotes[url] = ServerClient(url, os.environ.get(environment.API_KEY))
        return self._remotes[url]

    def _private_engines(self, location: ModelLocation) -> "PrivateEngines":
        with explained_extras():
            from helexa.generation.private import EngineSettings, PrivateEngines

        key = (location.device, location.dtype, location.context_length)
        if key not in self._engines:
            self._engines[key] = PrivateEngines(EngineSettings(*key), self._standby)
        return self._engines[key]
