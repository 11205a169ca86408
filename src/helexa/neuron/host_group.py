"""Host groups: several hosts compute a model, one stage of layers per host.

Host 0 runs the node's server and schedules. The other hosts are members: they register with host 0, and start a stage
process for each model that host 0 loads (`stage_processes`). This module reads the settings of a group (the table
`[group]` and torch's environment variables), and keeps track of the connected hosts.
"""

import asyncio
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from helexa.core.errors import ConfigError, HelexaError
from helexa.core.logs import quoted
from helexa.core.node_reports import GroupHost
from helexa.core.version import node_code_version
from helexa.http.listener import bind
from helexa.neuron.config import GroupConfig
from helexa.neuron.engine.ipc.host_channel import Channel, ChannelError, HostAddress, accept, wait_until_closed
from helexa.neuron.engine.ipc.messages import HostGroup

_VARIABLES = {"rank": "RANK", "world_size": "WORLD_SIZE", "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}
_LEAST_SECRET_BYTES = 16  # 128 bits; an attacker could find a shorter secret by brute force from a recorded handshake
# The default port of torch.distributed, whose environment variables may configure a group.
_DEFAULT_PORT = 29500

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 16  # maximum number of unauthenticated connections; further ones wait


@dataclass(frozen=True)
class GroupSettings:
    """The settings of one host of a group."""

    host: int
    hosts: int
    master: HostAddress
    own: HostAddress
    secret: bytes
    join_secs: float  # time that a load waits for hosts that are not connected, in seconds


def group_settings(config: GroupConfig, environ: Mapping[str, str]) -> GroupSettings:
    """Return the checked settings of a host group.

    Args:
        config: the table `[group]`. The environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT provide the
            keys that the table lacks.

    Raises:
        ConfigError: a setting is missing or invalid, or this machine lacks the address `interface`; the message has
            one line.
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
        raise ConfigError(f"the environment variable {variable} is '{text}', expected a number") from None


def _missing(key: str, meaning: str) -> str:
    variable = f" or {_VARIABLES[key]}" if key in _VARIABLES else f" or NEURON_GROUP__{key.upper()}"
    return f"the host group has no {key}; set [group] {key}{variable}: {meaning}"


def _private_address(interface: str) -> str:
    """Return the private IP address of `interface`, which is a name or an address."""
    text = interface
    if interface in (interfaces := psutil.net_if_addrs()):
        addresses = [entry.address for entry in interfaces[interface] if entry.family == socket.AF_INET]
        if not addresses:
            raise ConfigError(
                f"[group] interface '{interface}' has no IPv4 address; name another interface or an address"
            )
        text = addresses[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        known = ", ".join(sorted(interfaces))
        raise ConfigError(
            f"[group] interface '{interface}' is neither an IP address nor a network interface; name one of: {known}"
        ) from None
    if address.is_global or address.is_unspecified:
        raise ConfigError(
            f"[group] interface is {address}, which is not a private address; the group's connections are not "
            "encrypted; choose a private network"
        )
    return str(address)


def _secret(path: Path) -> bytes:
    try:
        secret = path.expanduser().read_bytes().strip()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"[group] secret_file {path} cannot be read: {reason}; make it readable for this user"
        ) from None
    if len(secret) < _LEAST_SECRET_BYTES:
        raise ConfigError(f"[group] secret_file {path} has {len(secret)} bytes, expected {_LEAST_SECRET_BYTES} or more")
    return secret


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Message of a host to host 0: join the group until the connection closes."""

    host: int
    hosts: int
    version: str
    hostname: str
    # address and port at which the host accepts connections of engines
    address: str
    port: int
    memory_mb: int  # the host's memory in MiB


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Message of host 0 to a host: the host belongs to the group now."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Message of host 0 to a host: the host cannot join, and a retry would fail, too."""

    message: str


class Membership:
    """On host 0: the hosts that have joined the group; threads watch their sockets."""

    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self._version = node_code_version()
        self._channels: dict[int, Channel] = {}
        self._members: dict[int, Join] = {}
        self._lock = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Begin to accept hosts.

        Raises:
            HelexaError: another process uses the port, or this machine does not have the address `settings.own`.
        """
        own = self.settings.own
        self._listener = bind((own.address, own.port))
        log.info("host group accepts hosts host=0 hosts=%d address=%s", self.settings.hosts, own)
        threading.Thread(target=self._accept_hosts, args=(self._listener,), name="host-group", daemon=True).start()

    def close(self) -> None:
        """Stop accepting hosts, and disconnect all hosts."""
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def members(self) -> list[Join]:
        """Return the connected hosts except host 0, in the order of their numbers."""
        with self._lock:
            return [self._members[host] for host in sorted(self._members)]

    def connected_hosts(self) -> list[GroupHost]:
        """Return the hosts that are connected now, beginning with host 0."""
        own = GroupHost(host=0, hostname=socket.gethostname(), memory_total_mb=psutil.virtual_memory().total >> 20)
        return [own] + [
            GroupHost(host=member.host, hostname=member.hostname, memory_total_mb=member.memory_mb)
            for member in self.members()
        ]

    async def host_group(self, hosts: int) -> HostGroup:
        """Wait for the hosts 1 to `hosts` - 1; return how an engine reaches them.

        Raises:
            HelexaError: a host is still missing after `join_secs`.
        """
        deadline = time.monotonic() + self.settings.join_secs
        while missing := self._missing(hosts):
            if time.monotonic() >= deadline:
                numbers = ", ".join(map(str, missing))
                raise HelexaError(
                    f"host {numbers} of the group is not connected to {self.settings.own}; start the node of that host "
                    f"with RANK={numbers}, or see the node's log"
                )
            await asyncio.sleep(0.1)
        addresses = [HostAddress(member.address, member.port) for member in self.members() if member.host < hosts]
        settings = self.settings
        return HostGroup(
            hosts=addresses, own_address=settings.own.address, secret=settings.secret, version=self._version
        )

    def _missing(self, hosts: int) -> list[int]:
        with self._lock:
            return [host for host in range(1, hosts) if host not in self._members]

    def _accept_hosts(self, listener: socket.socket) -> None:
        while True:
            self._handshakes.acquire()
            try:
                connection, (address, *_) = listener.accept()
            except OSError:
                return  # the listener was closed
            threading.Thread(target=self._serve, args=(connection, address), name="host-group", daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        """Authenticate a host, and keep it in the group until its connection ends."""
        try:
            try:
                channel = accept(connection, self.settings.secret, seconds=HANDSHAKE_SECONDS)
                join = channel.receive(Join)
            finally:
                self._handshakes.release()
            problem = self._problem(join)
            if problem is not None:
                fields = (quoted(join.hostname), address, quoted(problem))
                log.error("host cannot join the host group hostname=%s address=%s error=%s", *fields)
                channel.send(Rejected(problem))
                channel.close()
                return
            self._add(join, channel)
            channel.send(Joined())
        except ChannelError as error:
            log.warning("connection of the host group rejected or closed address=%s error=%s", address, quoted(error))
            return
        fields = (join.host, quoted(join.hostname), address)
        log.info("host joined the host group host=%d hostname=%s address=%s", *fields)
        wait_until_closed(channel.fileno())
        self._remove(join, channel)

    def _problem(self, join: Join) -> str | None:
        if join.hosts != self.settings.hosts:
            return (
                f"the joining host has world_size {join.hosts}, but host 0 has {self.settings.hosts}; set equal values"
            )
        if not 1 <= join.host < self.settings.hosts:
            return f"the joining host has rank {join.host}, expected 1 to {self.settings.hosts - 1}; correct its RANK"
        if join.version != self._version:
            return f"the joining host runs helexa {join.version}, but host 0 {self._version}; install the same version"
        return None

    def _add(self, join: Join, channel: Channel) -> None:
        with self._lock:
            previous = self._channels.get(join.host)
            self._channels[join.host], self._members[join.host] = channel, join
        if previous is not None:  # the host has restarted, and its earlier connection has not timed out yet
            previous.close()

    def _remove(self, join: Join, channel: Channel) -> None:
        with self._lock:
            if self._channels.get(join.host) is not channel:
                return
            del self._channels[join.host], self._members[join.host]
        with suppress(OSError):
            channel.close()
        fields = (join.host, quoted(join.hostname))
        log.warning("host is gone from the host group host=%d hostname=%s; models that use this host stop", *fields)
