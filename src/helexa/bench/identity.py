"""What a sample belongs to: target, host, build, model and scenario, each with the key that tells it from others."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TargetKind = Literal["neuron", "cortex", "openai", "anthropic"]
UNKNOWN = "unknown"
EXTERNAL = "external"
"""The sha of a server that does not say what it was built from."""


def digest(value: object) -> str:
    """A short hash of a JSON value, the same whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Target:
    """A server to be measured; `name` is its key."""

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
    """Hardware and driver under a target; another driver or card makes another host of the same name."""

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
        """Hash of what decides about speed; the kernel's version does not count."""
        cards = [[gpu.name, gpu.vram_total_mb] for gpu in self.gpus]
        return digest([self.cpu, self.cpu_cores, self.driver_version, self.cuda_version, cards])


@dataclass(frozen=True, slots=True)
class Build:
    """What was built and runs: a commit, and the versions of what it stands on.

    Attributes:
        engine: name of the program, as `helexa` or `llama.cpp`.
        sha: the commit, shortened; `external` where the server does not say.
        dirty: files differed from the commit; None where nobody knows.
        built_ms: when it was built, UTC epoch milliseconds.
        facts: everything else that it says of itself; another fact makes another build.
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
        """Hash of all that it says of itself, except for the time of the build."""
        return digest([self.version, self.sha_long, self.dirty, dict(self.facts)])


@dataclass(frozen=True, slots=True)
class Model:
    """A model as it is served.

    Attributes:
        config: what decides about its speed or answers: quantisation, harness, devices, limits.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def config_hash(self) -> str:
        """Hash of the configuration."""
        return digest(dict(self.config))


@dataclass(frozen=True, slots=True)
class ScenarioKey:
    """A scenario as it is stored.

    Attributes:
        name: for people, as `single:cold:4096`.
        kind: the family, as `single` or `concurrency`.
        params: all that decides about the load; another value makes another scenario of the same name.
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
    """What samples are counted for: they are topped up to N, then it is skipped."""

    target: Target
    host: Host
    build: Build
    model: Model
    scenario: ScenarioKey
