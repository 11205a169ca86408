"""Identity of samples: target, host, build, model and scenario, each with its unique key."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TargetKind = Literal["neuron", "cortex", "openai", "anthropic"]
UNKNOWN = "unknown"
EXTERNAL = "external"
"""The `sha` of a server that does not report its commit."""


def digest(value: object) -> str:
    """Return a short hash of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure; `name` is its key."""

    name: str
    kind: TargetKind
    endpoint: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator of a host."""

    name: str
    vram_total_mb: int


@dataclass(frozen=True, slots=True)
class Host:
    """Hardware and driver of a target; another driver or accelerator makes a different host with the same name."""

    hostname: str
    os: str = ""
    kernel: str = ""
    cpu: str = ""
    cpu_cores: int = 0
    memory_total_mb: int = 0
    driver_version: str = ""
    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()

    @property
    def fingerprint(self) -> str:
        """Hash of the properties that affect speed; the kernel version is excluded."""
        cards = [[gpu.name, gpu.vram_total_mb] for gpu in self.gpus]
        return digest([self.cpu, self.cpu_cores, self.driver_version, self.cuda_version, cards])


@dataclass(frozen=True, slots=True)
class Build:
    """A running program: its commit and the versions of its dependencies.

    Attributes:
        engine: name of the program, for example `helexa` or `llama.cpp`.
        sha: short commit; `external` if the server does not report it.
        sha_long: full commit, or empty.
        version: version of the program, or empty.
        dirty: whether files differed from the commit; None if unknown.
        built_ms: build time in UTC epoch milliseconds.
        facts: all other reported properties; a different property makes a different build.
    """

    engine: str
    sha: str
    sha_long: str = ""
    version: str = ""
    dirty: bool | None = None
    built_ms: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def fingerprint(self) -> str:
        """Hash of all reported properties except the build time."""
        return digest([self.version, self.sha_long, self.dirty, dict(self.facts)])


@dataclass(frozen=True, slots=True)
class Model:
    """A served model.

    Attributes:
        name: name in requests.
        config: properties that affect speed or answers: quantization, harness, devices, limits.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def config_hash(self) -> str:
        """Hash of the configuration."""
        return digest(dict(self.config))


@dataclass(frozen=True, slots=True)
class ScenarioKey:
    """A scenario as stored.

    Attributes:
        name: display name, for example `single:cold:4096`.
        kind: family, for example `single` or `concurrency`.
        params: all parameters of the load; different parameters make a different scenario with the same name.
    """

    name: str
    kind: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def params_hash(self) -> str:
        """Hash of kind and parameters."""
        return digest([self.kind, dict(self.params)])


@dataclass(frozen=True, slots=True)
class Cell:
    """The unit of measurement: each cell receives a given number of good samples."""

    target: Target
    host: Host
    build: Build
    model: Model
    scenario: ScenarioKey
