"""The messages with which hosts join a group."""

import msgspec


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Host -> host 0: join the group. The connection stays open as long as the host belongs to the group.

    Attributes:
        host: number of the host, from 1.
        hosts: number of hosts according to the host's settings.
        version: version of the host's code (see `code_version`).
        hostname: name of the host.
        address, port: where the host accepts connections of engines.
        memory_mb: the host's memory in MiB.
    """

    host: int
    hosts: int
    version: str
    hostname: str
    address: str
    port: int
    memory_mb: int


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Host 0 -> host: the host belongs to the group now."""


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """Host 0 -> host: the host cannot join the group. The message says why; a retry would fail, too."""

    message: str
