"""The membership of a host group, as host 0 sees it: which hosts are connected."""

import asyncio
import logging
import socket
import threading
import time
from contextlib import suppress

import psutil

from helexa.core.errors import HelexaError
from helexa.core.fleet import GroupHost
from helexa.http.listener import bind
from helexa.neuron.code_version import code_version
from helexa.neuron.engine.ipc.channel import Channel, ChannelError, HostAddress, accept, wait_until_closed
from helexa.neuron.engine.ipc.messages import HostGroup
from helexa.neuron.host_group.messages import Join, Joined, Rejected
from helexa.neuron.host_group.settings import GroupSettings

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 16
"""Maximum number of connections that are not authenticated yet. Further connections wait in the listening socket."""


class Membership:
    """The hosts that have joined the group. Threads of this object accept and watch their connections.

    Args:
        settings: the settings of host 0.
    """

    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self._version = code_version()
        self._channels: dict[int, Channel] = {}
        self._members: dict[int, Join] = {}
        self._lock = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Begin to accept hosts.

        Raises:
            HelexaError: another process uses the port, or this machine does not have the address.
        """
        own = self.settings.own
        self._listener = bind((own.address, own.port))
        log.info("host group: host 0 of %d accepts hosts at %s", self.settings.hosts, own)
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
        """Return the hosts that are connected now, in the order of their numbers."""
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
        """Wait until the hosts 1 to `hosts` - 1 are connected, and return how an engine connects to them.

        Raises:
            HelexaError: a host is still missing after `join_secs`.
        """
        deadline = time.monotonic() + self.settings.join_secs
        while missing := self._missing(hosts):
            if time.monotonic() >= deadline:
                numbers = ", ".join(map(str, missing))
                raise HelexaError(
                    f"host {numbers} of the group is not connected to {self.settings.own}; start its node with "
                    f"RANK={numbers}, or see its log"
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
                return  # closed
            threading.Thread(target=self._serve, args=(connection, address), name="host-group", daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        """Authenticate a host that has connected, and keep it in the group until its connection ends."""
        try:
            try:
                channel = accept(connection, self.settings.secret, seconds=HANDSHAKE_SECONDS)
                join = channel.receive(Join)
            finally:
                self._handshakes.release()
            problem = self._problem(join)
            if problem is not None:
                log.error("host group: %s (%s) cannot join: %s", join.hostname, address, problem)
                channel.send(Rejected(problem))
                channel.close()
                return
            self._add(join, channel)
            channel.send(Joined())
        except ChannelError as error:
            log.warning("host group: connection from %s: %s", address, error)
            return
        log.info("host group: host %d (%s, %s) has joined", join.host, join.hostname, address)
        wait_until_closed(channel.fileno())
        self._remove(join, channel)

    def _problem(self, join: Join) -> str | None:
        if join.hosts != self.settings.hosts:
            return f"its world_size is {join.hosts}, but host 0 has {self.settings.hosts}"
        if not 1 <= join.host < self.settings.hosts:
            return f"its rank is {join.host}, expected 1 to {self.settings.hosts - 1}"
        if join.version != self._version:
            return f"it runs helexa {join.version}, but host 0 runs {self._version}"
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
        log.warning("host group: host %d (%s) is gone", join.host, join.hostname)


def hosts_for(requested: int | None, group: Membership | None) -> int:
    """Return the number of hosts that compute a model together.

    Args:
        requested: the number in the load request or in the node's configuration; None for all hosts of the group.
        group: the node's host group; None if it has no group.

    Raises:
        HelexaError: the group has fewer hosts.
    """
    hosts = 1 if group is None else group.settings.hosts
    if requested is not None and not 1 <= requested <= hosts:
        where = "this node has no host group" if group is None else f"the host group has {hosts} hosts"
        raise HelexaError(f"pipeline_parallel is {requested}, but {where}")
    return hosts if requested is None else requested
