"""`cortex.toml`: the gateway's configuration."""

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from helexa.core import config, variables
from helexa.core.address import Address, BaseUrl, HostName, Listen
from helexa.http.connections.connection_limits import MAX_CONNECTIONS

ENV_PREFIX = "CORTEX_"


class GatewaySection(config.Section):
    """`[gateway]`.

    Attributes:
        listen: address of the API. A non-loopback address needs `entitlements.require_auth` or `insecure`.
        metrics_listen: address of the Prometheus metrics.
        insecure: allow listening on the network without required keys.
        cors_origins: origins whose pages may call the API; none by default, `*` for all.
        max_body_mb: largest request body in MiB.
        max_body_memory_mb: memory in MiB for all concurrent request bodies. None means 512 or four times `max_body_mb`,
            whichever is more. Must be at least twice `max_body_mb`, because one client address may use half of this
            memory.
        max_connections: maximum number of concurrent connections. The gateway reduces this number if the process's
            limit on open files is too low.
        max_connections_per_address: maximum number of connections of one client address. None means half of the maximum
            number of connections.
        poll_interval_secs: seconds between two polls of a node.
        load_timeout_secs: longest time that a load may take without progress.
        load_wait_secs: longest time that a request waits for its model to load.
        idle_timeout_secs: longest time without data from a node within a response, or before a response if the node
            is down.
        answer_timeout_secs: longest wait for the first byte of a response from a node that is up; 0 for no limit.
    """

    listen: Listen = Address("127.0.0.1", 31313)
    metrics_listen: Listen = Address("127.0.0.1", 31314)
    insecure: bool = False
    cors_origins: list[str] = Field(default_factory=list[str])
    max_body_mb: int = Field(default=64, ge=1)
    max_body_memory_mb: int | None = Field(default=None, ge=1)
    max_connections: int = Field(default=MAX_CONNECTIONS, ge=1)
    max_connections_per_address: int | None = Field(default=None, ge=1)
    poll_interval_secs: float = Field(default=10.0, gt=0)
    load_timeout_secs: float = Field(default=1800.0, gt=0)
    load_wait_secs: float = Field(default=600.0, gt=0)
    idle_timeout_secs: float = Field(default=300.0, gt=0)
    answer_timeout_secs: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_body_memory_mb is not None and self.max_body_memory_mb < 2 * self.max_body_mb:
            raise ValueError(f"max_body_memory_mb must be at least twice max_body_mb, {2 * self.max_body_mb} or more")
        return self

    @property
    def body_memory_bytes(self) -> int:
        """Memory in bytes for all concurrent request bodies."""
        return (self.max_body_memory_mb or max(512, 4 * self.max_body_mb)) << 20


class RoutingSection(config.Section):
    """`[routing]`.

    Attributes:
        affinity: send requests with the same prompt beginning to the same node, unless this node is too busy. The
            node's prefix cache contains the prompt beginning.
        affinity_min_bytes: minimum length in bytes of a prompt for affinity. A shorter prompt goes to the node with the
            lowest load.
        affinity_load_factor: maximum load of a preferred node: this multiple of the average load, plus one request.
        breaker_failures: number of consecutive transport failures after which a node gets no requests for a model.
        breaker_reset_secs: seconds after the last of these failures until the node gets a probe request for the model.
    """

    affinity: bool = True
    affinity_min_bytes: int = Field(default=1024, ge=0)
    affinity_load_factor: float = Field(default=1.25, ge=1)
    breaker_failures: int = Field(default=3, ge=1)
    breaker_reset_secs: float = Field(default=10.0, gt=0)


class EvictionSection(config.Section):
    """`[eviction]`.

    Attributes:
        strategy: `lru` weighs idle time against reload cost; `priority` evicts lower residency classes first.
        defrag_after_cycles: number of unloads on a node after which the gateway logs a warning; 0 for never.
        min_residency_secs: minimum time between a model's load and its eviction.
        idle_ttl_secs: a model that received no requests for this time is unloaded; 0 for never.
        swap_wait_secs: longest time that a request waits for a model in use to become idle. After this time, the model
            in use is drained and evicted.
    """

    strategy: Literal["lru", "priority"] = "lru"
    defrag_after_cycles: int = Field(default=50, ge=0)
    min_residency_secs: float = Field(default=30.0, ge=0)
    idle_ttl_secs: float = Field(default=0.0, ge=0)
    swap_wait_secs: float = Field(default=30.0, ge=0)


class WindowSection(config.Section):
    """`window` of a key: `{kind = "balance"}` or `{kind = "rolling", seconds = N}`."""

    kind: Literal["balance", "rolling"] = "balance"
    seconds: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "rolling") != (self.seconds > 0):
            raise ValueError("a rolling window needs 'seconds'; a balance must not have 'seconds'")
        return self


class KeySection(config.Section):
    """One `[[entitlements.keys]]` entry: a static key. The attributes are those of `Principal`."""

    key: SecretStr
    account_id: str = Field(min_length=1)
    key_id: str | None = None
    role: Literal["user", "admin"] = "user"
    models: list[str] | None = None
    hard_cap: int | None = Field(default=None, ge=0)
    window: WindowSection = Field(default_factory=WindowSection)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    concurrency: int | None = Field(default=None, ge=1)


class EntitlementsSection(config.Section):
    """`[entitlements]`.

    Attributes:
        require_auth: True to reject requests without a valid key. If False, these requests are anonymous.
        keys: static keys, in addition to the keys that `cortex keys` creates.
    """

    require_auth: bool = False
    keys: list[KeySection] = Field(default_factory=list[KeySection])


def _state_folder() -> Path:
    systemd = os.environ.get("STATE_DIRECTORY")
    state_home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Path(systemd.split(":")[0]) if systemd else state_home / "helexa"


class LedgerSection(config.Section):
    """`[ledger]`: the database of keys, budgets and the activity log.

    Attributes:
        url: `sqlite:PATH`, or `postgresql://user:password@host/database` if several gateways share one ledger.
    """

    url: SecretStr = Field(default_factory=lambda: SecretStr(f"sqlite:{_state_folder() / 'cortex.db'}"))


class NeuronSection(config.Section):
    """One `[[neurons]]` entry.

    Attributes:
        name: unique name of the node.
        endpoint: base URL, without `/v1`.
        kind: `neuron`, or `openai` for any other OpenAI-compatible server.
        bearer: key that the node requires, if any.
        cordoned: True to send no new requests and loads until the node is uncordoned.
        allowed_hosts: hosts other than the endpoint's that the node may name as the address of a model.
    """

    name: str = Field(min_length=1)
    endpoint: BaseUrl
    kind: Literal["neuron", "openai"] = "neuron"
    bearer: SecretStr | None = None
    cordoned: bool = False
    allowed_hosts: frozenset[HostName] = frozenset()


class CortexConfig(config.Section):
    """The contents of cortex.toml."""

    gateway: GatewaySection = Field(default_factory=GatewaySection)
    routing: RoutingSection = Field(default_factory=RoutingSection)
    eviction: EvictionSection = Field(default_factory=EvictionSection)
    entitlements: EntitlementsSection = Field(default_factory=EntitlementsSection)
    ledger: LedgerSection = Field(default_factory=LedgerSection)
    neurons: list[NeuronSection] = Field(default_factory=list[NeuronSection])
    models_config: Path = Path("/etc/cortex/models.toml")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [neuron.name for neuron in self.neurons]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two neurons are named '{name}'")
        return self


def load(path: Path | None) -> CortexConfig:
    """Return the configuration from the file and the `CORTEX_` environment variables.

    A relative `models_config` is relative to the file's directory.

    Raises:
        ConfigError: the file is missing or a value is invalid; the message is one line that names the key.
    """
    settings = config.load(CortexConfig, path, env_prefix=ENV_PREFIX)
    if path is not None:
        settings.models_config = path.absolute().parent / settings.models_config
    return settings


def log_unknown_variables() -> None:
    """Log a warning about `CORTEX_` environment variables that match no configuration key."""
    variables.log_unknown_variables(CortexConfig, prefix=ENV_PREFIX)
