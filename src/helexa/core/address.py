"""Validation of addresses in configurations: URLs, hosts and host patterns."""

import ipaddress
import re
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator


class Address(NamedTuple):
    """Host and port on which a server listens; with port 0, the system chooses one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: object) -> object:
    """Parse `host:port` or `[IPv6]:port`, and return an `Address`.

    Raises:
        ValueError: `text` does not have one of these formats.
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


def base_url(text: str) -> str:
    """Check that `text` is an http(s) URL, and return it without a final slash.

    Raises:
        ValueError: the text is not a valid URL, or contains credentials, a query or a fragment.
    """
    if "@" in text:  # the message omits the text, which may contain a password
        raise ValueError("the URL contains a user name or password; leave them out")
    try:
        split_url = urlsplit(text)
        host, port = (split_url.hostname or "").encode("idna"), split_url.port
    except ValueError:
        host, port, split_url = b"", 0, urlsplit("")
    if split_url.scheme not in ("http", "https") or not host or port == 0 or split_url.query or split_url.fragment:
        raise ValueError(f"'{text}' is not a URL; write http://host:port")
    return text.rstrip("/")


_API_PATH = re.compile(r"(?:/+v1)+(?:/+(?:models|chat/completions|completions|responses|messages|embeddings))?/*$")


def without_api_path(url: str) -> str:
    """Return `url` without a final API path, such as `/v1` in settings of clients."""
    path = urlsplit(url).path
    # Users may also paste `/v1` twice, or the path of a route.
    return url.removesuffix(path) + _API_PATH.sub("", path)


def _host_name(text: str) -> str:
    """Check a host name or address; return it in lower case, without brackets.

    Raises:
        ValueError: the text is not a host name or IP address.
    """
    host = text.lower().removeprefix("[").removesuffix("]")
    try:
        if urlsplit(f"//[{host}]" if ":" in host else f"//{host}").hostname == host and host.encode("idna"):
            return host
    except ValueError:
        pass
    raise ValueError(f"'{text}' is not a host; write a name or an IP address, without a port")


def host_pattern(text: str) -> str:
    """Check a pattern of allowed hosts, and return it in lower case.

    A pattern is `host`, `*.domain` for all subdomains, or `*` for all hosts. A port may follow, as in `host:8080`.
    Without a port, the pattern allows the ports 80 and 443.

    Raises:
        ValueError: the text is not a pattern.
    """
    pattern = text.lower()
    try:
        parts = urlsplit(f"//{'any' + pattern[1:] if pattern.startswith('*') else pattern}")
        is_valid = bool(parts.hostname) and parts.port != 0 and not (parts.path or parts.query or "@" in parts.netloc)
    except ValueError:
        is_valid = False
    if not is_valid or "*" in pattern[1:] or (pattern.startswith("*") and pattern[1:2] not in ("", ".", ":")):
        raise ValueError(f"'{text}' is not a host; write images.example.com, *.example.com, *, or host:port")
    return pattern


HostName = Annotated[str, AfterValidator(_host_name)]
HostPattern = Annotated[str, AfterValidator(host_pattern)]
Listen = Annotated[Address, BeforeValidator(parse_address)]
BaseUrl = Annotated[str, AfterValidator(base_url)]
ApiUrl = Annotated[str, AfterValidator(base_url), AfterValidator(without_api_path)]


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address `host`.

    Names are not resolved: the only loopback name is `localhost`.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"  # any other name may resolve to any address
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
