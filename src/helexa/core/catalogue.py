"""The catalogue (`models.toml`): which models a fleet may serve, where they fit, and the names they also answer to."""

import logging
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from helexa.core import config
from helexa.core.errors import ConfigError, SourceError
from helexa.core.fleet import Cost, Limit
from helexa.core.source import ModelSource

log = logging.getLogger(__name__)

DEFAULT_RESIDENCY = 100
PINNED_RESIDENCY = 1000


def _known_harness(name: object) -> object:
    return "torch" if name == "candle" else name


Harness = Annotated[Literal["torch"], BeforeValidator(_known_harness)]


class CataloguedLimit(Limit):
    """Token limits as catalogues state them; a node's own limit is the authority."""

    model_config = ConfigDict(extra="forbid")


class CataloguedCost(Cost):
    """Prices as catalogues state them: USD per million tokens."""

    model_config = ConfigDict(extra="forbid")


class Profile(config.Section):
    """One `[[models]]` entry.

    Attributes:
        id: name that requests use; the node serves the model under it too.
        harness: the node's engine; `candle` is read as `torch`.
        quant: quantisation to load, None for what the source holds.
        tool_parser: the notation of its calls, None for what its files show.
        vram_mb: footprint estimate, None when unknown.
        min_devices: accelerators the model is spread over.
        min_device_vram_mb: total memory that each of them needs.
        pinned_on: names of the only nodes that may serve it; empty means any.
        residency_priority: displacement class; 100, or 1000 for a pinned model, unless stated.
        source: a scheme (`huggingface`) or a full source id (`pypi:package`); None leaves it to the node.
        capabilities: used until a node reports its own.
        limit: used while no node reports one: those know.
        cost: USD per million tokens; None means unpriced.
    """

    id: str = Field(min_length=1)
    harness: Harness = "torch"
    quant: str | None = None
    tool_parser: str | None = None
    vram_mb: int | None = Field(default=None, ge=0)
    min_devices: int = Field(default=1, ge=1)
    min_device_vram_mb: int | None = Field(default=None, ge=0)
    pinned_on: list[str] = Field(default_factory=list[str])
    residency_priority: int | None = Field(default=None, ge=0)
    source: str | None = None
    capabilities: list[str] = Field(default_factory=list[str])
    limit: CataloguedLimit | None = None
    cost: CataloguedCost | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.residency_priority is None:
            self.residency_priority = PINNED_RESIDENCY if self.pinned_on else DEFAULT_RESIDENCY
        try:
            self.full_source()
        except SourceError as error:
            raise ValueError(str(error)) from None
        return self

    def full_source(self) -> str | None:
        """The source id a node is told: a bare scheme is completed with the model's id.

        Raises:
            SourceError: it is not a well-formed source.
        """
        if self.source is None:
            return None
        is_scheme = not any(character in self.source for character in ":/.~")
        return str(ModelSource.parse(f"{self.source}:{self.id}" if is_scheme else self.source))


class Catalogue(config.Section):
    """All profiles and aliases. An alias is one hop: its target is a model id, never another alias."""

    models: list[Profile] = Field(default_factory=list[Profile])
    aliases: dict[str, str] = Field(default_factory=dict[str, str])

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids = [profile.id for profile in self.models]
        for model in ids:
            if ids.count(model) > 1:
                raise ValueError(f"model '{model}' is listed twice")
        for alias in self.aliases:
            if alias in ids:
                raise ValueError(f"alias '{alias}' is also the id of a model")
        return self

    def resolve(self, name: str) -> str:
        """The model id that `name` stands for: an alias's target, else `name` itself."""
        return self.aliases.get(name, name)

    def profile(self, model_id: str) -> Profile | None:
        """The profile of a model id, None when it is not catalogued."""
        return self._profiles.get(model_id)

    @cached_property
    def _profiles(self) -> dict[str, Profile]:
        return {profile.id: profile for profile in self.models}


def load(path: Path) -> Catalogue:
    """Read a catalogue. A missing file is an empty catalogue and a warning: nodes may still serve what they hold.

    Raises:
        ConfigError: the file is there but cannot be read, or is not a valid catalogue.
    """
    try:
        catalogue = config.load(Catalogue, path, env_prefix="", environ={})
    except ConfigError:
        if not _is_missing(path):
            raise
        log.warning("NO CATALOGUE: %s does not exist; no model loads on demand and no alias works", path.absolute())
        return Catalogue()
    for alias, target in catalogue.aliases.items():
        if catalogue.profile(target) is None:
            log.warning("alias '%s' names '%s', which is not in %s", alias, target, path)
    return catalogue


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass  # it may be there, out of our sight
    return False
