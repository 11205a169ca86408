"""Selects the target of a request: a configured or local server, else a private engine."""

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helexa.core.extras import explained_extras
from helexa.generation import environment
from helexa.generation.errors import InvalidRequestError
from helexa.generation.target import Target
from helexa.neuron.engine_client.warm_standby import WarmStandby

if TYPE_CHECKING:
    from helexa.generation.private import PrivateEngines
    from helexa.generation.remote import Remote

PRIVATE = "private"
"""Value of `target` that selects a private engine."""

DEFAULT_MODEL = "helexa/small"
_LOCAL_URLS = ("http://127.0.0.1:31313", "http://127.0.0.1:13131")
"""Default URLs of a gateway and a node on this machine."""


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """The caller's choice of model and target. None selects the environment's value or a default.

    Attributes:
        model: `org/name`, `scheme:name`, or a path.
        target: URL of a gateway or a node, or `private`.
        device, dtype, quant: settings of a private engine; each of them selects a private engine if no server is given.
    """

    model: str | None = None
    target: str | None = None
    device: str | None = None
    dtype: str | None = None
    quant: str | None = None

    @property
    def wanted_model(self) -> str | None:
        """The requested model, or None for any model."""
        return self.model or environment.text(environment.MODEL)

    @property
    def url(self) -> str | None:
        """The requested server, or None."""
        said = self.target or environment.text(environment.BASE_URL)
        return None if said == PRIVATE else said

    @property
    def key(self) -> tuple[object, ...]:
        """Key of the target, including the present environment variables."""
        return (self, self.wanted_model, self.url, self.is_private)

    @property
    def is_private(self) -> bool:
        """Whether the target must be a private engine."""
        own = self.device or self.dtype or self.quant or environment.text(environment.DEVICE)
        return self.target == PRIVATE or (self.url is None and own is not None)


class Targets:
    """The targets of this process, created at first use. For use in one event loop."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Target] = {}
        self._engines: dict[tuple[str | None, str | None], PrivateEngines] = {}
        self._remotes: dict[str, Remote] = {}
        self._finding = asyncio.Lock()
        self._spare = WarmStandby()

    async def find(self, place: ModelLocation) -> Target:
        """Return the target for a place.

        Raises:
            HelexaError: no target was found.
        """
        async with self._finding:
            if (target := self._found.get(place.key)) is not None:
                return target
            if place.url is None and not place.is_private:
                # Do not cache the result: local servers may stop, and later requests then need another target.
                for url in _LOCAL_URLS:
                    if (target := await self._remote(url).loaded(place.wanted_model)) is not None:
                        return target
            target = self._found[place.key] = await self._choose(place)
            return target

    async def close(self) -> None:
        """Close all targets."""
        engines, self._engines = list(self._engines.values()), {}
        remotes, self._remotes = list(self._remotes.values()), {}
        self._found.clear()
        await self._spare.close()
        for remote in remotes:
            remote.close()
        await asyncio.gather(*(one.close() for one in engines), return_exceptions=True)

    async def _choose(self, place: ModelLocation) -> Target:
        model = place.wanted_model
        if place.url is not None and not place.is_private:
            if place.device or place.dtype or place.quant:
                raise InvalidRequestError(f"device, dtype and quant are up to the server at {place.url}")
            return await self._remote(place.url).target(model)
        if not self._engines:
            await self._spare.begin()  # The process starts while this process imports the modules of private engines.
        try:
            return self._engines_of(place).target(model or DEFAULT_MODEL, place.quant)
        except BaseException:
            await self._spare.close()
            raise

    def _remote(self, url: str) -> "Remote":
        from helexa.generation.remote import Remote

        if url not in self._remotes:
            self._remotes[url] = Remote(url, os.environ.get(environment.API_KEY))
        return self._remotes[url]

    def _engines_of(self, place: ModelLocation) -> "PrivateEngines":
        with explained_extras():
            from helexa.generation.private import EngineSettings, PrivateEngines

        key = (place.device, place.dtype)
        if key not in self._engines:
            self._engines[key] = PrivateEngines(EngineSettings(*key), self._spare)
        return self._engines[key]
