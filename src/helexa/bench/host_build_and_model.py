"""Target, host, build, model and scenario of a measurement."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TargetKind = Literal["neuron", "cortex", "openai", "anthropic"]
UNKNOWN = "unknown"
EXTERNAL = "external"  # the `sha` of a build whose server does not report its commit


def digest(value: object) -> str:
    """Return a short hash of a JSON value that does not depend on the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure. `name` identifies the server in the database."""

    name: str
    kind: TargetKind
    endpoint: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """An accelerator of a host."""

    name: str
    vram_total_mb: int


@dataclass(frozen=True, slots=True)
class Host:
    """The hardware and drivers of a target.

    If the CPU, the driver or an accelerator changes, the same machine counts as another host with the same name.
    """

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
        """Hash of CPU, number of cores, driver, CUDA version and accelerators."""
        cards = [[gpu.name, gpu.vram_total_mb] for gpu in self.gpus]
        return digest([self.cpu, self.cpu_cores, self.driver_version, self.cuda_version, cards])


@dataclass(frozen=True, slots=True)
class Build:
    """The program that a target runs: its commit, version and dependencies."""

    engine: str  # name of the program, for example `helexa` or `llama.cpp`
    sha: str  # abbreviated commit hash, or `external` if the server does not report it
    sha_long: str = ""  # full commit hash, or empty
    version: str = ""  # version of the program, or empty
    dirty: bool | None = None  # True if the source differed from the commit, or None if unknown
    built_ms: int | None = None  # build time in UTC epoch milliseconds
    # Other properties that the server reports, for example library versions. If one of them changes, the program counts
    # as another build.
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def fingerprint(self) -> str:
        """Hash of `version`, `sha_long`, `dirty` and `facts`."""
        return digest([self.version, self.sha_long, self.dirty, dict(self.facts)])


@dataclass(frozen=True, slots=True)
class Model:
    """A model and the configuration with which a target serves it."""

    name: str  # model name, as used in requests
    # properties that affect speed or responses: quantization, inference engine (harness), devices, limits
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def config_hash(self) -> str:
        """Hash of `config`."""
        return digest(dict(self.config))


@dataclass(frozen=True, slots=True)
class ScenarioKey:
    """The name and the parameters that identify a scenario in the database."""

    name: str  # display name, for example `single:cold:4096`
    kind: str  # kind of the scenario, for example `single` or `concurrency`
    # All parameters of the load. Scenarios with the same name but different parameters are different scenarios.
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def params_hash(self) -> str:
        """Hash of `kind` and `params`."""
        return digest([self.kind, dict(self.params)])


@dataclass(frozen=True, slots=True)
class Configuration:
    """A benchmark configuration: one scenario, on one model, build, host and target.

    Each configuration is measured until it has a given number of valid samples.
    """

    target: Target
    host: Host
    build: Build
    model: Model
    scenario: ScenarioKey

    @property
    def natural_key(self) -> tuple[str, ...]:
        """The database keys of target, host, build, model and scenario, as one tuple."""
        return (
            *(self.target.name, self.host.hostname, self.host.fingerprint),
            *(self.build.engine, self.build.sha, self.build.fingerprint),
            *(self.model.name, self.model.config_hash, self.scenario.name, self.scenario.params_hash),
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """The current host and build of a target (server to measure)."""

    host: Host
    build: Build
