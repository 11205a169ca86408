"""The configuration files of the gateway and the node that `helexa up` starts."""

import errno
import json
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from helexa.cli.terminal_output_and_errors import CONFIG, USAGE, CommandError
from helexa.cli.up_state_keys_and_logs import write_private
from helexa.core.address import is_loopback
from helexa.core.model_source_ids import ModelSource, typed_source
from helexa.neuron.builtin_models import BUILTIN_MODELS
from helexa.neuron.cache_folder import default_prompts_mb

LOOPBACK = "127.0.0.1"
OLLAMA_PORT = 11434  # port at which programs look for Ollama
OLLAMA_OPTION = "--ollama"

_EVERY_ADDRESS = ("0.0.0.0", "::")
_DECIDED_HERE = ("NEURON_HOST", "NEURON_PORT", "NEURON_API_KEY", "NEURON_DEFAULT_MODELS", "CORTEX_GATEWAY__LISTEN")
_DECIDED_HERE += (
    "HELEXA_UP_API_KEY",
    "CORTEX_GATEWAY__METRICS_LISTEN",
    "CORTEX_OLLAMA__LISTEN",
    "CORTEX_NEURONS",
    "CORTEX_MODELS_CONFIG",
)


_IDLE_UNLOAD_SECS = 600.0


@dataclass(frozen=True)
class LocalModel:
    """A model in the configuration of `helexa up`, which the node loads at start."""

    id: str  # name of the model in requests
    source: str | None  # where the model comes from, or None if `id` is also the source

    @classmethod
    def parse(cls, text: str) -> "LocalModel":
        """Return the model that an argument names: `org/name`, `scheme:name` or a path.

        Raises:
            SourceError: the text is invalid.
            CommandError: the path does not exist.
        """
        text = typed_source(text)
        source = ModelSource.parse(text)
        if source.scheme == "file":
            path = Path(source.name).expanduser().absolute()
            if not path.exists():
                raise CommandError(f"{path}: no such file; name a model file or folder, or a model such as org/name")
            return cls(path.stem if path.suffix.lower() == ".gguf" else path.name, f"file:{path}")
        scheme, colon, _ = text.partition(":")
        id = source.name + (f":{source.tag}" if source.tag else "")
        return cls(id, str(source) if colon and "/" not in scheme else None)

    def served_as(self, id: str) -> "LocalModel":
        """Return a model with the id `id` and the files of this model."""
        builtin = BUILTIN_MODELS.get(self.id)
        return LocalModel(id, self.source or (builtin.source if builtin else self.id))


@dataclass(frozen=True)
class LocalConfig:
    """Models, addresses and API key of the servers of `helexa up`.

    Only the gateway's API listens on `host`. The gateway's metrics and the node listen on the loopback address.
    """

    models: tuple[LocalModel, ...]  # models to load
    host: str  # address of the gateway's API
    port: int  # port of the gateway's API
    metrics_port: int  # port of the gateway's metrics
    neuron_port: int  # port of the node
    api_key: str = field(repr=False)  # the API key of the machine's owner. It has the role admin.
    # True to reject requests without this key. If False, clients need the key only for changes, for example of the
    # loaded models.
    require_auth: bool = False
    tensor_parallel: int = 1  # number of processes that compute each model together
    # further keys of each `[[default_models]]` table in the node's file
    model_settings: Mapping[str, str] = field(default_factory=dict[str, str])
    ollama: bool = False  # True if the gateway's API listens on `OLLAMA_PORT`, too
    # ids of models by additional names, which requests can use in place of the ids
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    # Seconds without requests after which a model sleeps; 0: never. None: `_IDLE_UNLOAD_SECS`, or never if no prompts
    # are kept on disk, because the next request would compute its prompt again.
    idle_unload_secs: float | None = None

    @property
    def gateway_url(self) -> str:
        """Base URL at which clients on this machine reach the gateway."""
        return self._url(self.port)

    @property
    def ollama_url(self) -> str:
        """Base URL at which Ollama's clients on this machine reach the gateway."""
        return self._url(OLLAMA_PORT)

    @property
    def lan_url(self) -> str | None:
        """Base URL for other machines if the gateway listens on all addresses, else None.

        The URL is also None if this machine's address is unknown.
        """
        address = _lan_address() if self.host in _EVERY_ADDRESS else None
        return None if address is None else f"http://{_address(address, self.port)}"

    @property
    def neuron_url(self) -> str:
        """Base URL at which the gateway reaches the node."""
        return f"http://{_address(LOOPBACK, self.neuron_port)}"

    @property
    def is_open(self) -> bool:
        """Whether clients on other machines can use the gateway without an API key."""
        return not self.require_auth and not is_loopback(self.host)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the configuration files into `folder`.

        Returns:
            The path of the node's file (neuron.toml) and the path of the gateway's file (cortex.toml).
        """
        neuron, cortex, catalog = (folder / name for name in ("neuron.toml", "cortex.toml", "models.toml"))
        gateway = {
            "listen": _address(self.host, self.port),
            "metrics_listen": _address(LOOPBACK, self.metrics_port),
            "insecure": self.is_open,
            "poll_interval_secs": 1.0,
            "local_models": True,
        }
        ollama = {"listen": _address(self.host, OLLAMA_PORT), "anyone_pulls": is_loopback(self.host)}
        prompts_mb = default_prompts_mb()
        idle_secs = self.idle_unload_secs
        harness = {
            "prefix_disk_mb": prompts_mb,
            "idle_unload_secs": (_IDLE_UNLOAD_SECS if prompts_mb else 0.0) if idle_secs is None else idle_secs,
            "tensor_parallel": self.tensor_parallel,
        }
        ledger = {"url": f"sqlite:{folder.absolute() / 'cortex.db'}"}  # each state folder has a ledger of its own
        neuron.write_text(
            _keys({"host": LOOPBACK, "port": self.neuron_port})
            + f"\n[harness.torch]\n{_keys(harness)}"
            + _tables(
                "default_models",
                ({"model_id": model.id, "source": model.source, **self.model_settings} for model in self.models),
            ),
            encoding="utf-8",
        )
        write_private(
            cortex,
            _keys({"models_config": str(catalog)})
            + f"\n[gateway]\n{_keys(gateway)}"
            + (f"\n[ollama]\n{_keys(ollama)}" if self.ollama else "")
            + f"\n[ledger]\n{_keys(ledger)}"
            + self._entitlements()
            + _tables("neurons", [{"name": "local", "endpoint": self.neuron_url}]),
        )
        # The gateway uses these settings to load a model again after an eviction. The chat template is left out,
        # because the node keeps it.
        loading = {key: value for key, value in self.model_settings.items() if key != "chat_template"}
        catalog.write_text(
            _tables("models", ({"id": model.id, "source": model.source, **loading} for model in self.models))
            + "\n[aliases]\n"
            + "".join(f"{json.dumps(alias)} = {json.dumps(id)}\n" for alias, id in self.aliases.items()),
            encoding="utf-8",
        )
        return neuron, cortex

    def _url(self, port: int) -> str:
        return f"http://{_address(LOOPBACK if self.host in _EVERY_ADDRESS else self.host, port)}"

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` without the variables that would override this configuration."""
        entitlements = "CORTEX_ENTITLEMENTS__" if self.require_auth else "CORTEX_ENTITLEMENTS__KEYS"
        decided = (*_DECIDED_HERE, entitlements)
        return {name: value for name, value in environ.items() if not name.startswith(decided)}

    def _entitlements(self) -> str:
        owner = {"key": self.api_key, "account_id": "owner", "role": "admin"}
        return f"\n[entitlements]\n{_keys({'require_auth': self.require_auth})}" + _tables("entitlements.keys", [owner])


def _lan_address() -> str | None:
    """Return the address from which this machine sends packets to other networks.

    Return None if the machine has no route to other networks. The function only connects a UDP socket, which sends no
    packets.
    """
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    return None


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tables(name: str, tables: Iterable[Mapping[str, str | None]]) -> str:
    return "".join(f"\n[[{name}]]\n{_keys(table)}" for table in tables)


def _keys(table: Mapping[str, str | float | None]) -> str:
    # JSON strings and numbers are valid TOML, except for strings with escaped surrogate pairs. `ensure_ascii=False`
    # avoids these escapes.
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in table.items() if value is not None
    )


def check_ports(host: str, ports: dict[str, int]) -> None:
    """Check that the servers of `helexa up` can listen on their ports.

    Args:
        host: address on which the gateway listens.
        ports: port by the option that sets it, such as `--port`.

    Raises:
        CommandError: two options have the same port, or a server cannot listen on its port.
    """
    for option, port in ports.items():
        twin = next(
            (other_option for other_option in ports if other_option != option and ports[other_option] == port), None
        )
        if twin:
            raise CommandError(f"{option} and {twin} are both {port}; choose different ports", USAGE)
    taken: list[str] = []
    for option, port in ports.items():
        address = host if option in ("--port", OLLAMA_OPTION) else LOOPBACK
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except UnicodeError:
            raise CommandError(
                f"cannot listen on {address}: the host name is invalid; correct --host", CONFIG
            ) from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                text = f"cannot listen on {address} port {port}: {error.strerror}; choose another host or another port"
                raise CommandError(text, CONFIG) from None
            taken.append(option)
    if taken:
        numbers = " and ".join(str(ports[option]) for option in taken)
        options = " and ".join(option for option in taken if option != OLLAMA_OPTION)
        advice = [f"choose another with {options}"] if options else []
        advice += ["leave out --ollama"] if OLLAMA_OPTION in taken else []
        state = f"port {numbers} is" if len(taken) == 1 else f"ports {numbers} are"
        text = f"{state} already in use; stop what listens there, or {', and '.join(advice)}"
        raise CommandError(text, CONFIG)
