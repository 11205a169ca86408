"""Which target answers: a server that is named or runs here, else a private engine."""

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helexa.core.extras import explained_extras
from helexa.generation import environment
from helexa.generation.errors import InvalidRequestError
from helexa.generation.target import Target
from helexa.neuron.engine_client.spare import Spare

if TYPE_CHECKING:
    from helexa.generation.private import PrivateEngines
    from helexa.generation.remote import Remote

PRIVATE = "private"
"""The target that is always a private engine."""

DEFAULT_MODEL = "helexa/small"
_LOCAL_URLS = ("http://127.0.0.1:31313", "http://127.0.0.1:13131")
"""Where a gateway and a node of this machine listen unless they are told otherwise."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which model is asked and where, as a caller says it; None leaves it to the environment, then to what there is.

    Attributes:
        model: its id, `org/name`, `scheme:name` or a path.
        target: the URL of a gateway or a node, or `private`.
        device, dtype, quant: of a private engine, which is what is used where one of them is given.
    """

    model: str | None = None
    target: str | None = None
    device: str | None = None
    dtype: str | None = None
    quant: str | None = None

    @property
    def wanted_model(self) -> str | None:
        """The model that is asked for, None for any."""
        return self.model or environment.text(environment.MODEL)

    @property
    def url(self) -> str | None:
        """The server that is asked for, None for none."""
        target = self.target or environment.text(environment.BASE_URL)
        return None if target == PRIVATE else target

    @property
    def key(self) -> tuple[object, ...]:
        """What tells one place from another, with what the environment says now."""
        return (self, self.wanted_model, self.url, self.is_private)

    @property
    def is_private(self) -> bool:
        """Whether only a private engine will do."""
        private_option = self.device or self.dtype or self.quant or environment.text(environment.DEVICE)
        return self.target == PRIVATE or (self.url is None and private_option is not None)


class Targets:
    """The targets of this process, each made when it is first asked for. Used in one event loop."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Target] = {}
        self._engines: dict[tuple[str | None, str | None], PrivateEngines] = {}
        self._remotes: dict[str, Remote] = {}
        self._finding = asyncio.Lock()
        self._spare = Spare()

    async def find(self, place: Place) -> Target:
        """The target for a place.

        Raises:
            HelexaError: there is none.
        """
        async with self._finding:
            if (target := self._found.get(place.key)) is not None:
                return target
            if place.url is None and not place.is_private:
                # Not for good: whatever runs on this machine may end, and the next question is for somebody else then.
                for url in _LOCAL_URLS:
                    if (target := await self._remote(url).loaded(place.wanted_model)) is not None:
                        return target
            target = self._found[place.key] = await self._choose(place)
            return target

    async def close(self) -> None:
        """Let go of all of them."""
        engines, self._engines = list(self._engines.values()), {}
        remotes, self._remotes = list(self._remotes.values()), {}
        self._found.clear()
        await self._spare.close()
        for remote in remotes:
            remote.close()
        await asyncio.gather(*(engine.close() for engine in engines), return_exceptions=True)

    async def _choose(self, place: Place) -> Target:
        model = place.wanted_model
        if place.url is not None and not place.is_private:
            if place.device or place.dtype or place.quant:
                raise InvalidRequestError(f"device, dtype and quant are up to the server at {place.url}")
            return await self._remote(place.url).target(model)
        if not self._engines:
            await self._spare.begin()  # it starts while all that a private engine needs here is imported
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

    def _engines_of(self, place: Place) -> "PrivateEngines":
        with explained_extras():
            from helexa.generation.private import EngineSettings, PrivateEngines

        key = (place.device, place.dtype)
        if key not in self._engines:
            self._engines[key] = PrivateEngines(EngineSettings(*key), self._spare)
        return self._engines[key]
