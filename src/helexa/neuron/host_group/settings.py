"""The checked settings of a host group, from the table `[group]` and the variables that `torch.distributed` uses."""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from helexa.core.errors import ConfigError
from helexa.neuron.config import GroupConfig
from helexa.neuron.engine.ipc.channel import HostAddress

_VARIABLES = {"rank": "RANK", "world_size": "WORLD_SIZE", "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
_LEAST_SECRET_BYTES = 16
_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class GroupSettings:
    """The settings of one host of a group.

    Attributes:
        host: number of this host, from 0.
        hosts: number of hosts.
        master: address at which host 0 accepts connections.
        own: address at which this host accepts connections.
        secret: the secret that all hosts share.
        join_secs: time that a load waits for hosts that are not connected, in seconds.
    """

    host: int
    hosts: int
    master: HostAddress
    own: HostAddress
    secret: bytes
    join_secs: float


def group_settings(config: GroupConfig, environ: Mapping[str, str]) -> GroupSettings:
    """Return the checked settings of a host group.

    Args:
        config: the table `[group]`. The environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT provide the
            keys that the table lacks.

    Raises:
        ConfigError: a setting is missing or invalid, or this machine does not have the address; the message has one
            line.
    """
    host, hosts = _number(config, "rank", environ), _number(config, "world_size", environ)
    if hosts < 2:
        raise ConfigError(f"[group] world_size is {hosts}; a group has at least 2 hosts")
    if not 0 <= host < hosts:
        raise ConfigError(f"[group] rank is {host}, expected 0 to {hosts - 1} (world_size is {hosts})")
    master = config.master_addr or environ.get("MASTER_ADDR")
    if not master:
        raise ConfigError(_missing("master_addr", "the address of host 0"))
    port = _number(config, "master_port", environ) if config.master_port or "MASTER_PORT" in environ else _DEFAULT_PORT
    if not 1 <= port <= 65535:
        raise ConfigError(f"[group] master_port is {port}, expected 1 to 65535")
    if not config.interface:
        raise ConfigError(_missing("interface", "this host's address or network interface in the private network"))
    if config.secret_file is None:
        raise ConfigError(_missing("secret_file", "a file with the secret that all hosts of the group share"))
    return GroupSettings(
        host=host,
        hosts=hosts,
        master=HostAddress(master, port),
        own=HostAddress(_private_address(config.interface), port),
        secret=_secret(config.secret_file),
        join_secs=config.join_timeout_secs,
    )


def _number(config: GroupConfig, key: str, environ: Mapping[str, str]) -> int:
    configured: int | None = getattr(config, key)
    if configured is not None:
        return configured
    variable = _VARIABLES[key]
    text = environ.get(variable)
    if text is None:
        raise ConfigError(_missing(key, "the number of this host, from 0" if key == "rank" else "the number of hosts"))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable} is '{text}', expected a number") from None


def _missing(key: str, meaning: str) -> str:
    variable = f" or {_VARIABLES[key]}" if key in _VARIABLES else f" or NEURON_GROUP__{key.upper()}"
    return f"the host group has no {key}; set [group] {key}{variable}: {meaning}"


def _private_address(interface: str) -> str:
    """Return the address of a network interface, or the address `interface` itself.

    Raises:
        ConfigError: there is no such interface, or the address is public or means all addresses.
    """
    text = interface
    if interface in (interfaces := psutil.net_if_addrs()):
        addresses = [entry.address for entry in interfaces[interface] if entry.family == socket.AF_INET]
        if not addresses:
            raise ConfigError(f"[group] interface '{interface}' has no IPv4 address")
        text = addresses[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        known = ", ".join(sorted(interfaces))
        raise ConfigError(
            f"[group] interface '{interface}' is neither an IP address nor a network interface ({known})"
        ) from None
    if address.is_global or address.is_unspecified:
        raise ConfigError(
            f"[group] interface is {address}, which is not a private address; the group's connections are not encrypted"
        )
    return str(address)


def _secret(path: Path) -> bytes:
    try:
        secret = path.expanduser().read_bytes().strip()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"[group] secret_file {path} cannot be read: {reason}") from None
    if len(secret) < _LEAST_SECRET_BYTES:
        raise ConfigError(f"[group] secret_file {path} has {len(secret)} bytes, expected {_LEAST_SECRET_BYTES} or more")
    return secret
