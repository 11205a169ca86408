"""The configuration files of the gateway and the node that `helexa up` starts."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from helexa.cli.failure import CommandError
from helexa.cli.local.state_folder import write_private
from helexa.core.source import ModelSource
from helexa.http.origin import is_loopback

LOOPBACK = "127.0.0.1"

_EVERY_ADDRESS = ("0.0.0.0", "::")
_DECIDED_HERE = ("NEURON_HOST", "NEURON_PORT", "NEURON_API_KEY", "NEURON_DEFAULT_MODELS", "CORTEX_GATEWAY__LISTEN")
_DECIDED_HERE += ("CORTEX_GATEWAY__METRICS_LISTEN", "CORTEX_NEURONS", "CORTEX_MODELS_CONFIG")


@dataclass(frozen=True)
class LocalModel:
    """A model that the node loads at its start.

    Attributes:
        id: name of the model in requests.
        source: where the model comes from, or None if `id` is also the source.
    """

    id: str
    source: str | None

    @classmethod
    def parse(cls, text: str) -> "LocalModel":
        """Return the model for a command line argument: `org/name`, `scheme:name` or a path.

        Raises:
            HelexaError: the text is invalid, or the path does not exist.
        """
        source = ModelSource.parse(text)
        if source.scheme == "file":
            path = Path(source.name).expanduser().absolute()
            if not path.exists():
                raise CommandError(f"{path}: no such file")
            return cls(path.stem if path.suffix.lower() == ".gguf" else path.name, f"file:{path}")
        scheme, colon, _ = text.partition(":")
        id = source.name + (f":{source.tag}" if source.tag else "")
        return cls(id, str(source) if colon and "/" not in scheme else None)


@dataclass(frozen=True)
class LocalConfig:
    """Models, addresses and API key of the gateway and the node that `helexa up` starts.

    Only the gateway's API listens on `host`. The gateway's metrics and the node listen on the loopback address.

    Attributes:
        models: models to load.
        host: address of the gateway's API.
        port: port of the gateway's API.
        metrics_port: port of the gateway's metrics.
        neuron_port: port of the node.
        api_key: the only API key that the gateway accepts. It has the role admin. None allows every client without a
            key.
        tensor_parallel: number of processes that compute each model together.
        model_settings: further keys of each model in `[[default_models]]` of the node.
    """

    models: tuple[LocalModel, ...]
    host: str
    port: int
    metrics_port: int
    neuron_port: int
    api_key: str | None = field(default=None, repr=False)
    tensor_parallel: int = 1
    model_settings: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def gateway_url(self) -> str:
        """Base URL at which clients on this machine reach the gateway."""
        return f"http://{_address(LOOPBACK if self.host in _EVERY_ADDRESS else self.host, self.port)}"

    @property
    def neuron_url(self) -> str:
        """Base URL at which the gateway reaches the node."""
        return f"http://{_address(LOOPBACK, self.neuron_port)}"

    @property
    def is_open(self) -> bool:
        """Whether clients on other machines can use the gateway without an API key."""
        return self.api_key is None and not is_loopback(self.host)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the configuration files into `folder`.

        Returns:
            The path of the node's file (neuron.toml) and the path of the gateway's file (cortex.toml).
        """
        neuron, cortex, catalogue = (folder / name for name in ("neuron.toml", "cortex.toml", "models.toml"))
        gateway = {
            "listen": _address(self.host, self.port),
            "metrics_listen": _address(LOOPBACK, self.metrics_port),
            "insecure": self.is_open,
            "poll_interval_secs": 1.0,
        }
        harness = {"tensor_parallel": self.tensor_parallel}
        ledger = {"url": f"sqlite:{folder.absolute() / 'cortex.db'}"}  # separate for each folder
        neuron.write_text(
            _keys({"host": LOOPBACK, "port": self.neuron_port})
            + ("" if self.tensor_parallel == 1 else f"\n[harness.torch]\n{_keys(harness)}")
            + _tables(
                "default_models",
                ({"model_id": model.id, "source": model.source, **self.model_settings} for model in self.models),
            ),
            encoding="utf-8",
        )
        write_private(
            cortex,
            _keys({"models_config": str(catalogue)})
            + f"\n[gateway]\n{_keys(gateway)}"
            + f"\n[ledger]\n{_keys(ledger)}"
            + self._entitlements()
            + _tables("neurons", [{"name": "local", "endpoint": self.neuron_url}]),
        )
        catalogue.write_text(
            _tables("models", ({"id": model.id, "source": model.source} for model in self.models)), encoding="utf-8"
        )
        return neuron, cortex

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` without the variables that would override the configuration files, for the servers."""
        decided = _DECIDED_HERE if self.api_key is None else (*_DECIDED_HERE, "CORTEX_ENTITLEMENTS__")
        return {name: value for name, value in environ.items() if not name.startswith(decided)}

    def _entitlements(self) -> str:
        if self.api_key is None:
            return ""
        owner = {"key": self.api_key, "account_id": "owner", "role": "admin"}
        return "\n[entitlements]\nrequire_auth = true\n" + _tables("entitlements.keys", [owner])


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tables(name: str, tables: Iterable[Mapping[str, str | None]]) -> str:
    return "".join(f"\n[[{name}]]\n{_keys(table)}" for table in tables)


def _keys(table: Mapping[str, str | float | None]) -> str:
    # JSON strings and numbers are valid TOML, except for surrogate pair escapes.
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in table.items() if value is not None
    )
