"""Fetches images from http(s) URLs. Hosts must be allowed, and IP addresses are checked before each connection."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Mapping

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from helexa.core.errors import ApiError, overloaded
from helexa.cortex.config import ImagesSection
from helexa.cortex.images.allowed_hosts import IpAddress, is_allowed, is_reachable
from helexa.cortex.images.image_file import ImageProblem, check_size, to_data_url
from helexa.http.body_budget import BodyBudget

log = logging.getLogger(__name__)

MAX_REDIRECTS = 3
MAX_FETCHES = 16
"""Maximum number of images that the gateway fetches at the same time."""
MAX_WAITING = 256

_PARALLEL_FETCHES = 4  # of one request
_CHUNK_BYTES = 64 << 10
_REDIRECTS = (301, 302, 303, 307, 308)
_RETRY_SECS = 2
_HEADERS = {
    "User-Agent": "helexa",
    "Accept": "image/png, image/jpeg, image/webp, image/gif",
    "Accept-Encoding": "identity",
}


class FetchMemory:
    """The memory of the fetched images of one request.

    It counts towards the gateway's memory for request bodies. Half of this memory is the maximum for the fetched images
    of all requests.

    Args:
        bodies: the memory limit for request bodies.
        max_bytes: maximum number of bytes for this request.
    """

    _OWNER = "fetched images"  # in place of a client address

    def __init__(self, bodies: BodyBudget, max_bytes: int) -> None:
        self._bodies = bodies
        self._max_bytes = max_bytes
        self._size = 0

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes for data URLs.

        Raises:
            ApiError: 413 if the images of the request are too large together. 503 if the gateway's memory is used up.
        """
        if self._size + size > self._max_bytes:
            raise ApiError(413, "request_too_large", "the request is too large together with its fetched images")
        self._bodies.reserve(self._OWNER, size)
        self._size += size

    def release(self) -> None:
        """Release all memory of the request."""
        if self._size:
            self._bodies.release(self._OWNER, self._size)
            self._size = 0


class ImageFetcher:
    """Fetches images from allowed hosts.

    Attributes:
        settings: the allowed hosts and networks, and the limits. They may be replaced at any time.
    """

    def __init__(self, settings: ImagesSection) -> None:
        self.settings = settings
        self._slots = asyncio.Semaphore(MAX_FETCHES)
        self._waiting = 0

    async def fetch(self, remote: Mapping[str, int], memory: FetchMemory) -> dict[str, str]:
        """Fetch images, and return the data URL of each image by its http(s) URL.

        Args:
            remote: number of the image in the request, for error messages, by http(s) URL.
            memory: the memory of the request.

        Raises:
            ApiError: 400: a host is not allowed, or an image cannot be fetched or is not a supported file. 413: the
                images are too large together. 503: too many images wait, or memory is used up.
        """
        if self._waiting + len(remote) > MAX_WAITING:
            raise overloaded("too many images wait to be fetched; try again", _RETRY_SECS)
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
        connector = aiohttp.TCPConnector(resolver=_CheckingResolver(self._may_connect), use_dns_cache=False)
        timeout = aiohttp.ClientTimeout(total=None)
        try:
            async with (
                asyncio.timeout(settings.fetch_timeout_secs),
                aiohttp.ClientSession(
                    connector=connector,
                    timeout=timeout,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    trust_env=False,
                    auto_decompress=False,
                ) as session,
            ):
                location = _parse(url)
                for _ in range(MAX_REDIRECTS + 1):
                    self._check(location)
                    async with session.get(location, allow_redirects=False, headers=_HEADERS) as response:
                        target = response.headers.get("Location")
                        if response.status not in _REDIRECTS or target is None:
                            return await self._content(response, memory)
                    location = _parse(target, location)
                raise _failed(f"redirects more than {MAX_REDIRECTS} times")
        except TimeoutError:
            raise _failed(f"was not received within {settings.fetch_timeout_secs:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = error if isinstance(error, _AddressError) else error.__cause__
            if isinstance(cause, _AddressError):
                raise ImageProblem("invalid_image_url", "is at an address that is not public") from None
            log.info("an image was not fetched: %s", type(error).__name__)
            raise _failed("could not be fetched") from None

    def _check(self, location: URL) -> None:
        """Check the host of a URL, and the IP address if the host is an IP address.

        The HTTP client calls the resolver only for host names.
        """
        host = (location.raw_host or "").lower()
        if not is_allowed(host, location.port or 0, self.settings.allowed_hosts):
            raise ImageProblem("invalid_image_url", f"is at the host {host[:200]!r}, from which no images are fetched")
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return
        if not self._may_connect(address):
            raise _AddressError(host)

    def _may_connect(self, address: IpAddress) -> bool:
        return is_reachable(address, self.settings.private_networks)

    async def _content(self, response: aiohttp.ClientResponse, memory: FetchMemory) -> bytes:
        if response.status != 200:
            raise _failed(f"could not be fetched: its server answered with status {response.status}")
        max_bytes = self.settings.max_bytes
        check_size(response.content_length or 0, max_bytes)
        content = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            check_size(len(content) + len(chunk), max_bytes)
            memory.reserve(-(-len(chunk) * 4 // 3))  # the length in base64
            content += chunk
        return bytes(content)


class _AddressError(OSError):
    """The gateway must not connect to the IP address of a host."""


class _CheckingResolver(AbstractResolver):
    """A DNS resolver that checks all addresses of a host.

    The HTTP client connects to the returned addresses, so it cannot connect to an address that was not checked.
    """

    def __init__(self, may_connect: Callable[[IpAddress], bool]) -> None:
        self._may_connect = may_connect
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._resolver.resolve(host, port, family)
        for address in addresses:
            if not self._may_connect(ipaddress.ip_address(address["host"].partition("%")[0])):
                raise _AddressError(host)
        return addresses

    async def close(self) -> None:
        await self._resolver.close()


def _parse(url: str, base: URL | None = None) -> URL:
    try:
        location = URL(url) if base is None else base.join(URL(url))
        is_plain = location.user is None and location.password is None
        if is_plain and location.scheme in ("http", "https") and location.raw_host and location.port:
            return location.with_fragment(None)
    except ValueError:
        pass
    raise ImageProblem("invalid_image_url", "is not at an http(s) URL without credentials")


def _failed(message: str) -> ImageProblem:
    return ImageProblem("failed_to_download_image", message)
