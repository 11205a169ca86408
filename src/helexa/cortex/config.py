"""`cortex.toml`: where the gateway listens and which nodes stand behind it."""

from pathlib import Path
from typing import Annotated, NamedTuple, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from helexa.core import config

ENV_PREFIX = "CORTEX_"


class Address(NamedTuple):
    """Where to listen; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: object) -> object:
    """Read `host:port` or `[v6]:port`.

    Raises:
        ValueError: it is anything else.
    """
    if isinstance(text, Address):
        return text
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not an address; write ip:port")
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"'{text}' is not an address; write ip:port")
    return Address(host, int(port))


def _base_url(text: str) -> str:
    if "@" in text:  # not repeated here: it may hold a password
        raise ValueError("a URL with a user name or password is not supported")
    try:
        parts = urlsplit(text)
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:
        host, port, parts = b"", 0, urlsplit("")
    if parts.scheme not in ("http", "https") or not host or port == 0 or parts.query or parts.fragment:
        raise ValueError(f"'{text}' is not a URL; write http://host:port")
    return text.rstrip("/")


Listen = Annotated[Address, BeforeValidator(parse_address)]
BaseUrl = Annotated[str, AfterValidator(_base_url)]


class GatewaySection(config.Section):
    """`[gateway]`.

    Attributes:
        listen: address of the API.
        metrics_listen: address of the Prometheus text.
        max_body_mb: largest request body in MiB.
        poll_interval_secs: seconds between two looks at a node.
        load_timeout_secs: longest time that a model may take to load.
    """

    listen: Listen = Address("0.0.0.0", 31313)
    metrics_listen: Listen = Address("0.0.0.0", 31314)
    max_body_mb: int = Field(default=64, ge=1)
    poll_interval_secs: float = Field(default=10.0, gt=0)
    load_timeout_secs: float = Field(default=1800.0, gt=0)


class NeuronSection(config.Section):
    """One `[[neurons]]` entry: a node's name and base URL."""

    name: str = Field(min_length=1)
    endpoint: BaseUrl


class CortexConfig(config.Section):
    """The whole file."""

    gateway: GatewaySection = Field(default_factory=GatewaySection)
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
