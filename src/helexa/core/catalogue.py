"""The catalogue (`models.toml`): models that a fleet may serve, their memory needs, and aliases."""

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
    """Token limits of a model in the catalogue. Limits that a node reports override these limits."""

    model_config = ConfigDict(extra="forbid")


class CataloguedCost(Cost):
    """Prices of a model in the catalogue, in USD per million tokens."""

    model_config = ConfigDict(extra="forbid")


class Profile(config.Section):
    """One `[[models]]` entry of the catalogue: a model, and how a fleet may serve it.

    Attributes:
        id: model id in requests, for both gateway and node.
        harness: the node's engine; `candle` means `torch`.
        quant: quantization to load; None for the source's own format.
        tool_parser: tool-call format; None to detect it from the model's files.
        vram_mb: estimated memory usage in MiB; None if unknown.
        min_devices: number of accelerators across which the model is split.
        min_device_vram_mb: smallest total memory of each of these accelerators, in MiB.
        pinned_on: names of the only nodes that may serve the model; empty for all nodes.
        residency_priority: eviction priority: a model is never evicted for a model of lower priority. Default 100, or
            1000 for a pinned model.
        source: a source scheme such as `huggingface`, or a full source id such as `pypi:package`; None for the node's
            default scheme.
        capabilities: capabilities to list until a node reports the model's own.
        limit: token limits to use until a node reports its own.
        cost: prices in USD per million tokens; None means unpriced.
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
        """Return the source id to send to nodes, or None if the profile has no source.

        If `source` is only a scheme, such as `huggingface`, the model's id is appended.

        Raises:
            SourceError: the source is not valid.
        """
        if self.source is None:
            return None
        is_scheme = not any(character in self.source for character in ":/.~")
        return str(ModelSource.parse(f"{self.source}:{self.id}" if is_scheme else self.source))


class Catalogue(config.Section):
    """Profiles of models, and aliases. Each alias stands for a model id, not for another alias."""

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
        """Return the model id that the alias `name` stands for; if `name` is not an alias, return `name`."""
        return self.aliases.get(name, name)

    def profile(self, model_id: str) -> Profile | None:
        """Return the profile of a model id, or None if the catalogue has none."""
        return self._profiles.get(model_id)

    @cached_property
    def _profiles(self) -> dict[str, Profile]:
        return {profile.id: profile for profile in self.models}


def load(path: Path) -> Catalogue:
    """Read the catalogue file `path`.

    If the file is missing, log a warning and return an empty catalogue: nodes may still serve models that they report.

    Raises:
        ConfigError: the file cannot be read, or is not a valid catalogue.
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
        pass  # the file may exist without being accessible
    return False
