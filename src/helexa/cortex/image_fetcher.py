"""Fetches images from http(s) URLs.

Hosts must be allowed, and IP addresses are checked before each connection. A client could otherwise use the gateway to
reach servers in the gateway's network (server-side request forgery).
"""

import asyncio
import ipaddress
import logging
import re
import socket
import ssl
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from helexa.core.errors import ApiError, overloaded
from helexa.core.image_file import ImageProblem, check_size, to_data_url
from helexa.cortex.config import ImagesSection
from helexa.cortex.upstream.client import CONNECT_TIMEOUT_SECS, connect
from helexa.cortex.upstream.connection_and_timeouts import (
    ConnectError,
    Origin,
    Timeouts,
    UpstreamConnection,
    UpstreamError,
    UpstreamResponse,
)
from helexa.http.service_and_memory_budget import BodyBudget

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Public IPv6 addresses. `is_global` alone is not sufficient: it is also true for site-local and local NAT64 addresses.
_IPV6_INTERNET = ipaddress.IPv6Network("2000::/3")


def is_allowed(host: str, port: int, patterns: Collection[str]) -> bool:
    """Return whether a pattern allows image URLs with this host and port.

    Args:
        host: host of a URL in lower case, without brackets.
        patterns: patterns of allowed hosts, in the format of `helexa.core.address.host_pattern`. A pattern without a
            port allows the ports 80 and 443.
    """
    written_host = f"[{host}]" if ":" in host else host
    hosts = {written_host, "*"} | {f"*{host[index:]}" for index, char in enumerate(host) if char == "."}
    return any(f"{name}:{port}" in patterns or (port in (80, 443) and name in patterns) for name in hosts)


def is_reachable(address: IpAddress, private_networks: Sequence[IpNetwork] = ()) -> bool:
    """Return whether an IP address is public or in one of `private_networks`.

    The result is always False for 6to4 and Teredo addresses.
    """
    # The address must be on the public internet or in one of the private networks. For an IPv6 address that NAT64 or
    # IPv4 mapping derives from an IPv4 address, this rule applies to the IPv4 address. 6to4 and Teredo addresses are
    # never allowed, because they are tunnels to an embedded IPv4 address.
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_reachable(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF), private_networks)
        if address.ipv4_mapped is not None:
            return is_reachable(address.ipv4_mapped, private_networks)
        if address.sixtofour is not None or address.teredo is not None:
            return False
    if any(address.version == network.version and address in network for network in private_networks):
        return True
    if address.version == 6 and address not in _IPV6_INTERNET:
        return False
    return address.is_global and not address.is_multicast


log = logging.getLogger(__name__)

MAX_REDIRECTS = 3
MAX_FETCHES = 16  # maximum number of images that the gateway fetches at the same time
MAX_WAITING = 256  # maximum number of images that are being fetched or wait to be fetched

_PARALLEL_FETCHES = 4  # maximum number of images of one request that are fetched at the same time
_REDIRECTS = (301, 302, 303, 307, 308)
_RETRY_SECS = 2
_HEADERS = (
    b"user-agent: helexa\r\naccept: image/png, image/jpeg, image/webp, image/gif\r\naccept-encoding: identity\r\n"
)
_LEGACY_ADDRESS = re.compile(r"[0-9.]+")
_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")
_PATH_CHARS = "%/:@!$&'()*+,;=~"
_QUERY_CHARS = _PATH_CHARS + "?"


class FetchMemory:
    """Reserves memory for the fetched images of one request.

    The memory counts towards the gateway's limit for request bodies. The fetched images of all requests together may
    use at most half of this limit.
    """

    # `BodyBudget` limits the memory per client address. All fetched images are reserved under this name instead.
    _OWNER = "fetched images"

    def __init__(self, bodies: BodyBudget, max_bytes: int) -> None:
        self._bodies = bodies  # the memory limit for request bodies
        self._max_bytes = max_bytes  # maximum number of bytes for this request
        self._size = 0

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes for data URLs.

        Raises:
            ApiError: 413 if the images of the request are too large together. 503 if the
                gateway's memory for images is used up.
        """
        if self._size + size > self._max_bytes:
            raise ApiError(
                413,
                "request_too_large",
                f"the fetched images of the request have more than {self._max_bytes} bytes, which is the rest "
                "of gateway.max_body_mb; send fewer or smaller images",
            )
        self._bodies.reserve(self._OWNER, size)
        self._size += size

    def release(self) -> None:
        """Release all memory of the request."""
        if self._size:
            self._bodies.release(self._OWNER, self._size)
            self._size = 0


class ImageFetcher:
    """Fetches images from allowed hosts."""

    def __init__(self, settings: ImagesSection) -> None:
        self.settings = settings  # the allowed hosts and networks, and the limits. They may be replaced at any time.
        self._slots = asyncio.Semaphore(MAX_FETCHES)
        self._waiting = 0

    async def fetch(self, remote: Mapping[str, int], memory: FetchMemory) -> dict[str, str]:
        """Fetch images, and return the data URL of each image by its http(s) URL.

        Args:
            remote: http(s) URLs of the images. Each URL has the number of its image in the request, for error messages.
            memory: reserves memory for the images of the request. The caller releases it.

        Raises:
            ApiError: 400: a host is not allowed, or an image cannot be fetched or is not a supported file. 413: the
                images are too large together. 503: too many images wait, or the memory for images is used up.
        """
        if self._waiting + len(remote) > MAX_WAITING:
            raise overloaded(
                f"{self._waiting} images already wait to be fetched, and the limit is {MAX_WAITING}; try again",
                _RETRY_SECS,
            )
        self._waiting += len(remote)
        slots = asyncio.Semaphore(_PARALLEL_FETCHES)

        async def fetch_one(url: str, number: int) -> str:
            try:
                async with slots, self._slots:
                    return to_data_url(await self._file(url, memory))
            except ImageProblem as problem:
                raise problem.api_error(number) from None

        fetches = [asyncio.ensure_future(fetch_one(url, number)) for url, number in remote.items()]
        try:
            return dict(zip(remote, await asyncio.gather(*fetches), strict=True))
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)
            self._waiting -= len(remote)

    async def _file(self, url: str, memory: FetchMemory) -> bytes:
        settings = self.settings
        try:
            async with asyncio.timeout(settings.fetch_timeout_secs):
                location = _parse(url)
                for _ in range(MAX_REDIRECTS + 1):
                    response = await self._get(location)
                    try:
                        target = next((value for name, value in response.headers if name == b"location"), None)
                        if response.status not in _REDIRECTS or target is None:
                            return await self._content(response, memory)
                    finally:
                        response.close()
                    location = _parse(target.decode("utf-8", "replace"), location.url)
                raise _failed(
                    f"the image URL redirects more than {MAX_REDIRECTS} times; send the final URL, or a data URL"
                )
        except TimeoutError:
            raise _failed(
                f"the image was not received within {settings.fetch_timeout_secs:g} s; try again, send a data URL, or "
                "raise images.fetch_timeout_secs"
            ) from None
        except _AddressError:
            raise ImageProblem(
                "invalid_image_url", "the image URL leads to an address that is not public; send a data URL"
            ) from None
        except (UpstreamError, OSError, ValueError) as error:
            log.info("image not fetched error=%s", type(error).__name__)
            raise _failed("the image could not be fetched from its URL; try again, or send a data URL") from None

    async def _get(self, location: "_Location") -> UpstreamResponse:
        """Send a request over a new connection, and return the response.

        The gateway resolves the host once, checks the IP addresses, and connects to one of them. A second resolution
        could give an address that was not checked.
        """
        origin, failure = location.origin, UpstreamError("the host of the image URL has no address")
        if not is_allowed(origin.host, origin.port, self.settings.allowed_hosts):
            raise ImageProblem(
                "invalid_image_url",
                f"the image URL has the host {origin.host[:200]!r}, which images.allowed_hosts does not allow; "
                "send a data URL",
            )
        loop, timeouts = asyncio.get_running_loop(), Timeouts(self.settings.fetch_timeout_secs, 0)
        try:
            addresses = [str(ipaddress.ip_address(origin.host))]
        except ValueError:
            if _LEGACY_ADDRESS.fullmatch(origin.host):
                raise  # a legacy form of an IPv4 address, such as 127.1, which a resolver would accept
            flags = socket.AI_ADDRCONFIG  # no IPv6 addresses if this machine has no IPv6
            found = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM, flags=flags)
            addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        for address in addresses:
            if not self._may_connect(ipaddress.ip_address(address.partition("%")[0])):
                raise _AddressError(origin.host)
        for address in addresses:
            try:
                connection = await connect(
                    lambda: UpstreamConnection(origin, timeouts, UpstreamConnection.abort, _nothing, loop),
                    origin,
                    address,
                    _tls() if origin.tls else None,
                    CONNECT_TIMEOUT_SECS,
                )
            except ConnectError as error:
                failure = error
                continue
            head = b"GET %s HTTP/1.1\r\nhost: %s\r\n" % (location.target.encode(), origin.authority.encode())
            return await connection.ask(head + _HEADERS, b"", None, False)
        raise failure

    def _may_connect(self, address: IpAddress) -> bool:
        return is_reachable(address, self.settings.private_networks)

    async def _content(self, response: UpstreamResponse, memory: FetchMemory) -> bytes:
        if response.status != 200:
            raise _failed(f"the server of the image URL answered with status {response.status}; check the URL")
        max_bytes = self.settings.max_bytes
        length = next((value for name, value in response.headers if name == b"content-length"), b"0")
        check_size(int(length), max_bytes)
        content = bytearray()
        while chunk := await response.chunk():
            check_size(len(content) + len(chunk), max_bytes)
            memory.reserve(-(-len(chunk) * 4 // 3))  # the number of characters in base64
            content += chunk
        return bytes(content)


class _AddressError(OSError):
    """The gateway must not connect to the IP address of a host."""


class _Location(NamedTuple):
    """An http(s) URL: the server, and the target of a request to it."""

    url: str
    origin: Origin
    target: str


def _parse(url: str, base: str = "") -> _Location:
    try:
        url = urljoin(base, url)
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode().lower(), parts.port
        is_plain = parts.username is None and parts.password is None and "\\" not in parts.netloc
        if is_plain and parts.scheme in ("http", "https") and host and port != 0:
            is_tls = parts.scheme == "https"
            query = f"?{_escaped(parts.query.replace(' ', '+'), _QUERY_CHARS)}" if parts.query else ""
            target = _escaped(_without_dots(parts.path) or "/", _PATH_CHARS) + query
            return _Location(url, Origin(host, port or (443 if is_tls else 80), is_tls), target)
    except ValueError:
        pass
    raise ImageProblem(
        "invalid_image_url", "the image URL is malformed, is not http(s), or contains credentials; send a data URL"
    )


def _escaped(text: str, safe: str) -> str:
    """Percent-encode characters that a URL must not contain, except existing escapes."""
    return quote(_PERCENT.sub("%25", text), safe=safe)


def _without_dots(path: str) -> str:
    """Return a path without segments `.` and `..` (RFC 3986, section 5.2.4)."""
    return urljoin("http://host/", path)[len("http://host") :] if "/." in path and path[1:2] != "/" else path


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _nothing(_connection: UpstreamConnection) -> None:
    """Do nothing when a connection ends, because no connection pool contains it."""


def _failed(message: str) -> ImageProblem:
    return ImageProblem("failed_to_download_image", message)
