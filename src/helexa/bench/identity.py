"""Types that describe a measurement: target, host, build, model and scenario, with their keys in the database."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TargetKind = Literal["neuron", "cortex", "openai", "anthropic"]
UNKNOWN = "unknown"
EXTERNAL = "external"
"""The `sha` of a build whose server does not report its commit."""


def digest(value: object) -> str:
    """Return a short hash of a JSON value. The order of dict keys does not matter."""
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

    If the driver or an accelerator changes, the same machine becomes another host with the same name.
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
        """Hash of the properties that affect speed. The kernel version is not included."""
        cards = [[gpu.name, gpu.vram_total_mb] for gpu in self.gpus]
        return digest([self.cpu, self.cpu_cores, self.driver_version, self.cuda_version, cards])


@dataclass(frozen=True, slots=True)
class Build:
    """The program that a target runs: its commit, version and dependencies.

    Attributes:
        engine: name of the program, for example `helexa` or `llama.cpp`.
        sha: abbreviated commit hash, or `external` if the server does not report it.
        sha_long: full commit hash, or empty.
        version: version of the program, or empty.
        dirty: True if the source differed from the commit, or None if unknown.
        built_ms: build time in UTC epoch milliseconds.
        facts: other properties that the server reports, for example library versions. If one of them changes, the
            program counts as another build.
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
    """A model and the configuration with which a target serves it.

    Attributes:
        name: model name, as used in requests.
        config: properties that affect speed or responses: quantization, inference engine (harness), devices, limits.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def config_hash(self) -> str:
        """Hash of `config`."""
        return digest(dict(self.config))


@dataclass(frozen=True, slots=True)
class ScenarioKey:
    """The name and the parameters that identify a scenario in the database.

    Attributes:
        name: display name, for example `single:cold:4096`.
        kind: kind of the scenario, for example `single` or `concurrency`.
        params: all parameters of the load. Scenarios with the same name but different parameters are different
            scenarios.
    """

    name: str
    kind: str
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
