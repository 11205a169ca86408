"""Dataclasses for the rows of the database tables."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from helexa.bench.request_records_and_metrics import RequestRecord, RunMeasures


@dataclass(frozen=True, slots=True)
class Reading:
    """Row of a reading of one accelerator, `at_s` seconds after a sample's start."""

    at_s: float
    device: int
    vram_used_mb: int | None = None
    utilization_pct: float | None = None
    temp_c: float | None = None


@dataclass(slots=True)
class Sample:
    """One execution of a scenario. It is stored as a row of the table `run`."""

    started_ms: int  # start in UTC epoch milliseconds
    start: float  # start on the client's monotonic clock, in seconds
    duration_s: float  # duration in seconds
    seed: int | None  # random seed of the load, or None if unknown
    ok: bool  # True if the sample is valid
    error: str | None = None  # reason why the sample is invalid, or None
    records: list[RequestRecord] = field(default_factory=list[RequestRecord])
    measures: RunMeasures | None = None  # metrics of the requests, or None if the sample was imported
    readings: list[Reading] = field(default_factory=list[Reading])  # readings of accelerators during the sample
    artifact: str | None = None  # response text to store, or None
    # additional columns of the row, for example `load_s` or `concurrency`
    columns: dict[str, float | int | None] = field(default_factory=dict[str, float | int | None])
    # additional data, stored in the JSON column `metrics`
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class RunRow:
    """A sample (row of the table `run`) with the names of its configuration."""

    id: int
    key: str
    target_id: int
    host_id: int
    build_id: int
    model_id: int
    scenario_id: int
    target: str
    target_kind: str
    hostname: str
    engine: str
    sha: str
    build_version: str
    model: str
    scenario: str
    scenario_kind: str
    started_ms: int
    duration_s: float
    bench_version: str
    seed: int | None
    ok: bool
    error: str | None
    estimated: bool
    requests: int
    completed: int
    rejected: int
    timed_out: int
    failed: int
    incomplete: int
    concurrency: int | None
    rate_rps: float | None
    prompt_tokens: float | None
    cached_tokens: float | None
    completion_tokens: float | None
    ttft_s: float | None
    ttft_p95_s: float | None
    ttfo_s: float | None
    tpot_s: float | None
    icl_s: float | None
    e2e_s: float | None
    e2e_p95_s: float | None
    output_tps_user: float | None
    output_tps: float | None
    prefill_tps: float | None
    prefill_s: float | None
    decode_s: float | None
    queue_s: float | None
    goodput_rps: float | None
    goodput_share: float | None
    unload_s: float | None
    load_s: float | None
    release_s: float | None
    score: float | None
    vram_used_mb: int | None
    gpu_util_pct: float | None
    gpu_temp_c: float | None


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request of a sample (row of the table `request`).

    `chunks_s` contains the arrival time of each chunk, in seconds since the request was sent. `scheduled_s`, `sent_s`
    and `ended_s` are seconds since the start of the sample.
    """

    run_id: int
    number: int
    role: str
    status: str
    http_status: int | None
    error: str | None
    finish_reason: str | None
    scheduled_s: float
    sent_s: float
    ended_s: float
    ttft_s: float | None
    ttfo_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    prefill_s: float | None
    decode_s: float | None
    queue_s: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    reasoning_tokens: int | None
    estimated: bool
    chunks_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BuildRow:
    """A measured build (row of the table `build`)."""

    id: int
    engine: str
    sha: str
    fingerprint: str
    sha_long: str
    version: str
    dirty: bool | None
    built_ms: int | None
    facts: dict[str, Any]
    first_seen_ms: int


@dataclass(frozen=True, slots=True)
class HostRow:
    """A host with its hardware and drivers (row of the table `host`)."""

    id: int
    hostname: str
    fingerprint: str
    os: str
    kernel: str
    cpu: str
    cpu_cores: int
    memory_total_mb: int
    driver_version: str
    cuda_version: str
    gpus: list[dict[str, Any]]
    first_seen_ms: int


@dataclass(frozen=True, slots=True)
class TargetRow:
    """A measured server (row of the table `target`)."""

    id: int
    name: str
    kind: str
    endpoint: str
    label: str


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A model with its configuration (row of the table `model`)."""

    id: int
    name: str
    config_hash: str
    config: dict[str, Any]
    first_seen_ms: int


@dataclass(frozen=True, slots=True)
class ScenarioRow:
    """A scenario with its parameters (row of the table `scenario`)."""

    id: int
    name: str
    params_hash: str
    kind: str
    params: dict[str, Any]


class ConfigurationIds(NamedTuple):
    """The row ids of a benchmark configuration."""

    target_id: int
    host_id: int
    build_id: int
    model_id: int
    scenario_id: int


@dataclass(frozen=True, slots=True)
class ConfigurationRow:
    """One benchmark configuration: row ids, sample counts and times.

    This is a row of the views `cell_stats` and `latest_cell`.
    """

    target_id: int
    host_id: int
    build_id: int
    model_id: int
    scenario_id: int
    samples: int
    failures: int
    first_ms: int
    last_ms: int
    last_ok_ms: int | None

    @property
    def ids(self) -> ConfigurationIds:
        """The row ids of the benchmark configuration."""
        return ConfigurationIds(self.target_id, self.host_id, self.build_id, self.model_id, self.scenario_id)


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """The score of a sample's response (row of the table `score`)."""

    run_id: int
    scorer: str
    score: float
    at_ms: int


@dataclass(frozen=True, slots=True)
class AlertRow:
    """A suspected, confirmed or dismissed change (row of the table `alert`)."""

    id: int
    target_id: int
    host_id: int
    build_id: int
    model_id: int
    scenario_id: int
    metric: str
    state: str
    verdict: str
    ratio: float
    ratio_low: float
    ratio_high: float
    threshold: float
    samples: int
    baseline_samples: int
    baseline_builds: list[int]
    raised_ms: int
    updated_ms: int
    delivered_ms: int | None

    @property
    def ids(self) -> ConfigurationIds:
        """The row ids of the benchmark configuration."""
        return ConfigurationIds(self.target_id, self.host_id, self.build_id, self.model_id, self.scenario_id)
