"""`cortex.toml`: the gateway's configuration."""

import os
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, IPvAnyNetwork, SecretStr, model_validator

from helexa.core import config, environment_variables
from helexa.core.address import Address, ApiUrl, BaseUrl, HostName, HostPattern, Listen
from helexa.core.config import FormerSetting
from helexa.cortex.upstream.tls import client_context
from helexa.http.acceptor import MAX_CONNECTIONS

ENV_PREFIX = "CORTEX_"


def _neurons_of(nodes: object) -> object:
    """Convert the entries of the former table `[[nodes]]` to `[[neurons]]` entries.

    The former entries were mistral.rs servers, so they get the kind `openai`. Their fields `vram_mb` and `pinned` are
    dropped.
    """
    if not isinstance(nodes, list):
        return nodes
    return [
        {key: node[key] for key in ("name", "endpoint") if key in node} | {"kind": "openai"}
        for node in nodes
        if isinstance(node, dict)
    ]


_FORMER_SETTINGS = (
    FormerSetting(("nodes",), ("neurons",), _neurons_of),
    FormerSetting(("upstream",), reason="keys and budgets are in this gateway's ledger: `cortex keys create`"),
)


class GatewaySection(config.Section):
    """The table `[gateway]`: listen addresses, limits and timeouts."""

    # Address of the API. A non-loopback address needs `entitlements.require_auth` or `insecure`.
    listen: Listen = Address("127.0.0.1", 31313)
    metrics_listen: Listen = Address("127.0.0.1", 31314)  # address of the Prometheus metrics
    insecure: bool = False  # True to allow a non-loopback `listen` address although requests need no key
    # Origins of web pages that may call the API from a browser. `*` means all origins.
    cors_origins: list[str] = Field(default_factory=list[str])
    # IP addresses or networks of reverse proxies. If a request comes from one of them, the header `X-Forwarded-For`
    # tells the address of the client for the activity log.
    trusted_proxies: list[IPvAnyNetwork] = Field(default_factory=list[IPvAnyNetwork])
    max_body_mb: int = Field(default=64, ge=1)  # maximum size of a request body in MiB
    # Maximum memory in MiB for all concurrent request bodies. None means 512 or four times `max_body_mb`, whichever is
    # more. One client address may use half of this memory, so the value must be at least twice `max_body_mb`.
    max_body_memory_mb: int | None = Field(default=None, ge=1)
    # Maximum number of concurrent connections. The gateway reduces this number if the process's limit on open files is
    # too low.
    max_connections: int = Field(default=MAX_CONNECTIONS, ge=1)
    # Maximum number of connections of one client address. None means half of the maximum number of connections.
    max_connections_per_address: int | None = Field(default=None, ge=1)
    # At SIGTERM, longest wait in seconds for running requests to end. The gateway rejects new requests during this
    # time.
    drain_secs: float = Field(default=5.0, ge=0)
    poll_interval_secs: float = Field(default=10.0, gt=0)  # seconds between two polls of a node
    load_timeout_secs: float = Field(default=1800.0, gt=0)  # a model load fails after this time without progress
    load_wait_secs: float = Field(default=600.0, gt=0)  # longest time that a request waits for its model to load
    # A request fails if its node sends no data for this time during the response body. Before the response body, it
    # fails after this time only if the node is down.
    idle_timeout_secs: float = Field(default=300.0, gt=0)
    # Longest wait for the first byte of the response body from a node that is up. 0 means no limit.
    answer_timeout_secs: float = Field(default=0.0, ge=0)
    # True to serve the models on the disks of the nodes, in addition to those of the catalog. The gateway loads them on
    # demand.
    local_models: bool = False
    # PEM file with certificate authorities that the gateway trusts, in addition to those of the system, for nodes with
    # https endpoints. A relative path is relative to the folder of cortex.toml.
    ca_file: Path | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_body_memory_mb is not None and self.max_body_memory_mb < 2 * self.max_body_mb:
            raise ValueError(
                f"max_body_memory_mb is {self.max_body_memory_mb}, but must be at least twice max_body_mb, "
                f"{2 * self.max_body_mb}"
            )
        return self

    @property
    def body_memory_bytes(self) -> int:
        """Maximum memory in bytes for all concurrent request bodies."""
        return (self.max_body_memory_mb or max(512, 4 * self.max_body_mb)) << 20


class RoutingSection(config.Section):
    """The table `[routing]`: choice of a node for a request, and the circuit breaker."""

    # True to send requests whose prompts begin with the same text to the same node, because this node probably has the
    # text in its prefix cache. If the node is too busy, the request goes to another node.
    affinity: bool = True
    # Minimum length in bytes of a prompt for affinity. A request with a shorter prompt goes to the node with the lowest
    # load.
    affinity_min_bytes: int = Field(default=1024, ge=0)
    # Limit for the load of the node that affinity prefers. The limit is this factor times the average load of the
    # nodes, plus one request.
    affinity_load_factor: float = Field(default=1.25, ge=1)
    # after this number of consecutive transport failures of a model on a node, the node gets no more requests for this
    # model
    breaker_failures: int = Field(default=3, ge=1)
    # seconds after the last transport failure until the node gets one probe request for the model
    breaker_reset_secs: float = Field(default=10.0, gt=0)


class ImagesSection(config.Section):
    """The table `[images]`: images in prompts."""

    max_images: int = Field(default=100, ge=1)  # maximum number of images in a request
    max_image_mb: int = Field(default=20, ge=1)  # maximum size of an image file in MiB
    # Hosts from which the gateway fetches images that have http(s) URLs, such as `images.example.com`, `*.example.com`
    # or `*`. If empty, the gateway rejects these images.
    allowed_hosts: frozenset[HostPattern] = frozenset()
    # networks, such as `10.1.0.0/16`, from which the gateway may fetch images although their addresses are not public
    private_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    fetch_timeout_secs: float = Field(default=10.0, gt=0)  # longest time for fetching one image

    @property
    def max_bytes(self) -> int:
        """Maximum size of an image file in bytes."""
        return self.max_image_mb << 20


class EvictionSection(config.Section):
    """The table `[eviction]`: when the gateway unloads models."""

    # Which model is evicted first. `lru` compares idle times and reload costs. `priority` evicts models of lower
    # `residency_priority` first.
    strategy: Literal["lru", "priority"] = "lru"
    # Each time a node has unloaded this many further models, the gateway logs a warning, because the node's free memory
    # may be fragmented. 0 means never.
    defrag_after_cycles: int = Field(default=50, ge=0)
    min_residency_secs: float = Field(default=30.0, ge=0)  # minimum time between a model's load and its eviction
    # A model that received no requests for this time is unloaded. 0 means never.
    idle_ttl_secs: float = Field(default=0.0, ge=0)
    # A request may need the memory of a loaded model that is still serving other requests. It waits at most this time
    # for the loaded model to become idle. After this time, the loaded model gets no new requests, and is evicted when
    # its running requests have ended.
    swap_wait_secs: float = Field(default=30.0, ge=0)


class WindowSection(config.Section):
    """The `window` of a key: the period in which its token cap `hard_cap` applies.

    With `{kind = "balance"}`, the period never ends. With `{kind = "rolling", seconds = N}`, a new period begins after
    N seconds.
    """

    kind: Literal["balance", "rolling"] = "balance"
    seconds: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "rolling") != (self.seconds > 0):
            raise ValueError(
                f"the window has the kind '{self.kind}' and seconds = {self.seconds}; a 'rolling' window needs "
                "'seconds' above 0, and a 'balance' must not have 'seconds'"
            )
        return self


def _or_unlimited(value: object) -> object:
    return None if value == "unlimited" else value


class TermsSection(config.Section):
    """Allowed models, budget and limits of a key or user. See `Principal` for fields.

    The text `unlimited` removes a limit explicitly. A reload rejects a file from which a limit has disappeared, because
    the file may be incomplete.
    """

    models: Annotated[list[str] | None, BeforeValidator(_or_unlimited)] = None
    hard_cap: Annotated[int | None, BeforeValidator(_or_unlimited)] = Field(default=None, ge=0)
    window: WindowSection = Field(default_factory=WindowSection)
    requests_per_minute: Annotated[int | None, BeforeValidator(_or_unlimited)] = Field(default=None, ge=1)
    tokens_per_minute: Annotated[int | None, BeforeValidator(_or_unlimited)] = Field(default=None, ge=1)
    concurrency: Annotated[int | None, BeforeValidator(_or_unlimited)] = Field(default=None, ge=1)


class KeySection(TermsSection):
    """One `[[entitlements.keys]]` entry: an API key in cortex.toml.

    See `Principal` for the fields.
    """

    key: SecretStr
    account_id: str = Field(min_length=1)
    key_id: str | None = None
    role: Literal["user", "admin"] = "user"


class EntitlementsSection(config.Section):
    """The table `[entitlements]`: who may use the API."""

    require_auth: bool = False  # True to reject requests without a valid key. If False, such requests are anonymous.
    # keys in cortex.toml, in addition to the keys that `cortex keys` creates in the ledger
    keys: list[KeySection] = Field(default_factory=list[KeySection])


def _state_folder() -> Path:
    systemd = os.environ.get("STATE_DIRECTORY")
    state_home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Path(systemd.split(":")[0]) if systemd else state_home / "helexa"


class LedgerSection(config.Section):
    """The table `[ledger]`: the database of keys, budgets and the activity log."""

    # `sqlite:PATH`, or `postgresql://user:password@host/database` if several gateways share one ledger
    url: SecretStr = Field(default_factory=lambda: SecretStr(f"sqlite:{_state_folder() / 'cortex.db'}"))


class OidcSection(TermsSection):
    """The table `[console.oidc]`: sign-in with OpenID Connect."""

    issuer: BaseUrl  # URL of the identity provider. The gateway reads `ISSUER/.well-known/openid-configuration`.
    # the credentials of the gateway at the provider
    client_id: str = Field(min_length=1)
    client_secret: SecretStr | None = None
    # URL under which browsers reach the gateway. The provider must allow the redirect to
    # `PUBLIC_URL/console/oidc/callback`.
    public_url: BaseUrl
    # Claim of the ID token whose value becomes the account name. If the claim is `email`, the provider must have
    # verified the e-mail address.
    account_claim: str = Field(default="email", min_length=1)
    # Accounts that may sign in. `*` at the beginning matches any prefix, as in `*@example.com`.
    users: list[str] = Field(default_factory=list[str])
    # accounts that sign in with the role `admin`, in the format of `users`
    admins: list[str] = Field(default_factory=list[str])

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.users or self.admins):
            raise ValueError("no account may sign in; list accounts in 'users' or 'admins'")
        return self


class ConsoleSection(config.Section):
    """The table `[console]`: the web page that the gateway serves to browsers at `/`."""

    enabled: bool = True  # False to serve no page and accept no sign-in
    session_hours: float = Field(default=12.0, gt=0, le=24 * 90)  # hours after which a sign-in expires
    bench_url: BaseUrl | None = None  # URL of helexa-bench's pages, which the console links to. None for no link.
    oidc: OidcSection | None = None  # sign-in with OpenID Connect, in addition to API keys. None to disable it.


class OllamaSection(config.Section):
    """The table `[ollama]`: Ollama's API."""

    enabled: bool = True  # False to answer the paths of Ollama's API with 404
    # Second address of the gateway's API, for clients that connect to Ollama's address 127.0.0.1:11434. None for no
    # second address. A non-loopback address needs `entitlements.require_auth` or `gateway.insecure`.
    listen: Listen | None = None
    # True to let every client download models with `/api/pull`. False to require an admin's key.
    anyone_pulls: bool = False


class NeuronSection(config.Section):
    """One `[[neurons]]` entry: a node that the gateway forwards requests to."""

    name: str = Field(min_length=1)  # unique name of the node
    endpoint: ApiUrl  # base URL of the node. A `/v1` at its end is removed.
    kind: Literal["neuron", "openai"] = "neuron"  # `neuron`, or `openai` for any other OpenAI-compatible server
    bearer: config.HeaderSecret | None = None  # API key that the node requires. None if it requires none.
    # Path of a file with this key, instead of `bearer`. A relative path is relative to the folder of cortex.toml.
    bearer_file: Path | None = None
    # name of an environment variable with this key, instead of `bearer`
    bearer_env: str | None = Field(default=None, min_length=1)
    cordoned: bool = False  # True to send no requests and loads to the node until it is uncordoned
    # A node may report that a model is served at another URL. The host of this URL must be the host of `endpoint` or
    # one of these hosts.
    allowed_hosts: frozenset[HostName] = frozenset()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(value is not None for value in (self.bearer, self.bearer_file, self.bearer_env)) > 1:
            raise ValueError("set only one of 'bearer', 'bearer_file' and 'bearer_env'")
        return self


class CortexConfig(config.Section):
    """The contents of cortex.toml."""

    gateway: GatewaySection = Field(default_factory=GatewaySection)
    routing: RoutingSection = Field(default_factory=RoutingSection)
    images: ImagesSection = Field(default_factory=ImagesSection)
    eviction: EvictionSection = Field(default_factory=EvictionSection)
    entitlements: EntitlementsSection = Field(default_factory=EntitlementsSection)
    ledger: LedgerSection = Field(default_factory=LedgerSection)
    console: ConsoleSection = Field(default_factory=ConsoleSection)
    ollama: OllamaSection = Field(default_factory=OllamaSection)
    neurons: list[NeuronSection] = Field(default_factory=list[NeuronSection])
    models_config: Path = Path("/etc/cortex/models.toml")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [neuron.name for neuron in self.neurons]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two neurons are named '{name}'; rename one of them")
        return self


def load(path: Path | None, origins: dict[environment_variables.Keys, str] | None = None) -> CortexConfig:
    """Read the configuration from `path` and `CORTEX_` variables.

    Relative paths are resolved against the directory of the file. The keys in `bearer_file` and `bearer_env` become the
    `bearer` of their nodes.

    Args:
        path: path of cortex.toml. If None, only the variables are read.
        origins: a dictionary to fill with the origins of the values (see `helexa.core.config.load`).

    Raises:
        ConfigError: `path`, `ca_file`, a `bearer_file` or the variable `bearer_env` is missing, or a value is invalid.
            The message is one line that names the setting.
    """
    settings = config.load(CortexConfig, path, env_prefix=ENV_PREFIX, former=_FORMER_SETTINGS, origins=origins)
    folder = Path() if path is None else path.absolute().parent
    if path is not None:
        settings.models_config = folder / settings.models_config
    if settings.gateway.ca_file is not None:
        settings.gateway.ca_file = folder / settings.gateway.ca_file
        # Load the file now, so that an error in it is reported here and not at the first connection to a node.
        client_context(settings.gateway.ca_file)
    for neuron in settings.neurons:
        if neuron.bearer_file is not None:
            neuron.bearer_file = folder / neuron.bearer_file
            neuron.bearer = config.read_secret(neuron.bearer_file, f"bearer_file of neuron '{neuron.name}'")
        elif neuron.bearer_env is not None:
            neuron.bearer = config.secret_in_variable(neuron.bearer_env, f"bearer_env of neuron '{neuron.name}'")
    return settings


def log_unknown_variables(settings: CortexConfig) -> None:
    """Log a warning about `CORTEX_` variables that set nothing."""
    keys = [neuron.bearer_env for neuron in settings.neurons if neuron.bearer_env is not None]
    environment_variables.log_unknown_variables(CortexConfig, prefix=ENV_PREFIX, other_names=keys)


def secrets_of(section: BaseModel) -> Iterator[str]:
    """Yield each secret in a section and its subsections, except `sqlite:` URLs."""
    for value in vars(section).values():
        for item in value if isinstance(value, list) else [value]:  # pyright: ignore[reportUnknownVariableType]
            if isinstance(item, SecretStr):
                # `ledger.url` is a secret, but a `sqlite:` URL contains only a path, no password.
                if not (secret := item.get_secret_value()).startswith("sqlite:"):
                    yield secret
            elif isinstance(item, BaseModel):
                yield from secrets_of(item)
