"""`cortex.toml`: where the gateway listens and which nodes stand behind it."""

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
        listen: address of the API. Others than this machine's own need `entitlements.require_auth`, or `insecure`.
        metrics_listen: address of the Prometheus text.
        insecure: listen on the network without keys all the same.
        cors_origins: origins whose pages may call the API; none by default, `*` for all.
        max_body_mb: largest request body in MiB.
        max_body_memory_mb: memory in MiB for all request bodies at a time; None for 512 or four times `max_body_mb`,
            whichever is more. At least twice `max_body_mb`, because one client address may use half of it.
        max_connections: most connections that are served at a time; fewer if the limit on open files is low.
        max_connections_per_address: most connections of one client address; None for half of all.
        poll_interval_secs: seconds between two looks at a node.
        load_timeout_secs: longest time that a load may go on without progress.
        load_wait_secs: longest time that a request waits for its model to load.
        idle_timeout_secs: longest silence of a node within a response, and before it if the node is down.
        answer_timeout_secs: longest wait for the first byte of a response from a living node; 0 for no limit.
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
        """Memory for all request bodies at a time."""
        return (self.max_body_memory_mb or max(512, 4 * self.max_body_mb)) << 20


class RoutingSection(config.Section):
    """`[routing]`.

    Attributes:
        affinity: send what begins alike to the node that has it cached, while that node is not too busy.
        affinity_min_bytes: prompts shorter than this go to the least busy node.
        affinity_load_factor: how much busier than the average a node may be and still be preferred.
        breaker_failures: transport faults in a row after which a node is not asked for a model.
        breaker_reset_secs: seconds until it is tried again.
    """

    affinity: bool = True
    affinity_min_bytes: int = Field(default=1024, ge=0)
    affinity_load_factor: float = Field(default=1.25, ge=1)
    breaker_failures: int = Field(default=3, ge=1)
    breaker_reset_secs: float = Field(default=10.0, gt=0)


class EvictionSection(config.Section):
    """`[eviction]`.

    Attributes:
        strategy: `lru` weighs idle time against reload cost; `priority` looks at the residency class first.
        defrag_after_cycles: warn after so many unloads on a node; 0 for never.
        min_residency_secs: a model stays at least this long after its load.
        idle_ttl_secs: unload what nobody asked for so long; 0 for never.
        swap_wait_secs: longest time that requests wait for a warm model's queue before it is swapped out for theirs.
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
            raise ValueError("a rolling window needs seconds, a balance has none")
        return self


class KeySection(config.Section):
    """One `[[entitlements.keys]]` entry: a static key. Its attributes are those of `Principal`."""

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
        require_auth: refuse requests without a valid key; else they are anonymous.
        keys: static keys, beside those that `cortex keys` makes.
    """

    require_auth: bool = False
    keys: list[KeySection] = Field(default_factory=list[KeySection])


def _state_folder() -> Path:
    systemd = os.environ.get("STATE_DIRECTORY")
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Path(systemd.split(":")[0]) if systemd else home / "helexa"


class LedgerSection(config.Section):
    """`[ledger]`: where keys, budgets and the activity log live.

    Attributes:
        url: `sqlite:PATH`, or `postgresql://user:password@host/database` when several gateways share one ledger.
    """

    url: SecretStr = Field(default_factory=lambda: SecretStr(f"sqlite:{_state_folder() / 'cortex.db'}"))


class NeuronSection(config.Section):
    """One `[[neurons]]` entry.

    Attributes:
        name: unique name of the node.
        endpoint: base URL, without `/v1`.
        kind: `neuron`, or `openai` for any other server that speaks the OpenAI dialect.
        bearer: key that the node asks for, if it does.
        cordoned: not asked for anything new until it is uncordoned.
        allowed_hosts: hosts besides the endpoint's that the node may name as the address of a model.
    """

    name: str = Field(min_length=1)
    endpoint: BaseUrl
    kind: Literal["neuron", "openai"] = "neuron"
    bearer: SecretStr | None = None
    cordoned: bool = False
    allowed_hosts: frozenset[HostName] = frozenset()


class CortexConfig(config.Section):
    """The whole file."""

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
    """Read the file and the `CORTEX_` variables; a relative `models_config` is taken from the file's own directory.

    Raises:
        ConfigError: one line naming what is wrong.
    """
    settings = config.load(CortexConfig, path, env_prefix=ENV_PREFIX)
    if path is not None:
        settings.models_config = path.absolute().parent / settings.models_config
    return settings


def log_unknown_variables() -> None:
    """Log one line about `CORTEX_` variables that set nothing."""
    variables.log_unknown_variables(CortexConfig, prefix=ENV_PREFIX)
