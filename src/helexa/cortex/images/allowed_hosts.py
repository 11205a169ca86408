"""Decides from which hosts and IP addresses the gateway may fetch images.

A client could otherwise use the gateway to reach servers in the gateway's network (server-side request forgery).
"""

import ipaddress
from collections.abc import Collection, Sequence

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_allowed(host: str, port: int, patterns: Collection[str]) -> bool:
    """Return whether one of the patterns allows to fetch images from this host.

    Args:
        host: host of a URL in lower case, without brackets.
        port: port of the URL.
        patterns: patterns of allowed hosts, in the format of `helexa.core.address.host_pattern`.
    """
    written_host = f"[{host}]" if ":" in host else host
    hosts = {written_host, "*"} | {f"*{host[index:]}" for index, char in enumerate(host) if char == "."}
    return any(f"{name}:{port}" in patterns or (port in (80, 443) and name in patterns) for name in hosts)


def is_reachable(address: IpAddress, private_networks: Sequence[IpNetwork] = ()) -> bool:
    """Return whether the gateway may connect to an IP address.

    The address must be on the public internet or in one of the private networks. If an IPv6 address embeds an IPv4
    address, the rule applies to the IPv4 address.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_reachable(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF), private_networks)
        if address.ipv4_mapped is not None:
            return is_reachable(address.ipv4_mapped, private_networks)
        if address.sixtofour is not None or address.teredo is not None:
            return False
    if any(address.version == network.version and address in network for network in private_networks):
        return True
    return address.is_global and not address.is_multicast
