"""The tool fetch: returns pages of the public internet as text."""

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Annotated, Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from msgspec import Meta
from yarl import URL

from helexa.acp.conversation_and_events import CardContent, Text, ToolKind
from helexa.acp.host import ToolError
from helexa.acp.tools.excerpt import clipped, fenced, shown_whole, title
from helexa.acp.tools.tool_and_effects import Act, Arguments, BuiltIn, Fetches, Progress, ToolContext, ToolOutcome

_SECONDS = 30
_MAX_PAGE_BYTES = 2 << 20
_MAX_REDIRECTS = 5
_TEXT_TYPES = ("json", "xml", "javascript", "yaml", "toml")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Page:
    """A fetched web page."""

    url: str  # final URL after redirects
    status: int  # HTTP status
    text: str  # text of the page, without markup
    truncated: bool  # whether the page was too large. If True, `text` contains only the beginning of the page.


def parse_url(url: str) -> URL:
    """Check the URL of a web page and return it without its fragment (`#...`).

    Raises:
        ToolError: the URL is not an http(s) URL, or contains credentials.
    """
    try:
        address = URL(url.strip())
        if address.scheme in ("http", "https") and address.host and address.user is None and address.port:
            return address.with_fragment(None)
    except ValueError:
        pass
    raise ToolError(f"{url!r} is not an http(s) URL without credentials; write a URL such as https://example.org/")


def is_public(address: Address) -> bool:
    """Return whether an IP address is on the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address.sixtofour is not None or address.teredo is not None:
            return False
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
    return address.is_global and not address.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


async def fetch_page(url: str, allowed: Callable[[Address], bool] = is_public) -> Page:
    """Fetch a web page, following redirects to the same host.

    A redirect to another host raises an error that names the new URL, because the user must permit each host. A
    response with an error status, such as 404, is returned.

    Args:
        allowed: function that returns whether connections to an IP address are allowed.

    Raises:
        ToolError: the request failed, the address is not allowed, or the page is not text.
    """
    address = parse_url(url)
    connector = aiohttp.TCPConnector(resolver=_GuardedResolver(allowed), use_dns_cache=False)
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    try:
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        ) as session:
            for _ in range(_MAX_REDIRECTS + 1):
                _check_literal(address, allowed)
                headers = {"User-Agent": "helexa-acp", "Accept": "text/html, text/*;q=0.9, */*;q=0.1"}
                async with session.get(address, allow_redirects=False, headers=headers) as response:
                    location = response.headers.get("Location")
                    if response.status not in (301, 302, 303, 307, 308) or location is None:
                        return await _page(response)
                    target = parse_url(str(address.join(URL(location))))
                    if target.host != address.host:
                        raise ToolError(f"{address} redirects to another host; to follow it, fetch {target}")
                    address = target
    except _Forbidden as error:
        raise ToolError(str(error)) from error
    except TimeoutError as error:
        raise ToolError(f"{address} did not answer within {_SECONDS} s; try again later") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        if isinstance(error.__cause__, _Forbidden):
            raise ToolError(str(error.__cause__)) from error
        raise ToolError(f"{address} cannot be fetched: {error}; check the URL") from error
    raise ToolError(f"{url} redirects more than {_MAX_REDIRECTS} times; fetch another page")


class _Forbidden(OSError):
    """The IP address of a host is not allowed."""

    def __init__(self, host: str) -> None:
        super().__init__(f"{host} is not on the public internet; fetch a public page")


class _GuardedResolver(AbstractResolver):
    """A DNS resolver that returns only IP addresses that `allowed` accepts."""

    # The HTTP client connects to the returned addresses, so it cannot use an address that was not checked.
    def __init__(self, allowed: Callable[[Address], bool]) -> None:
        self._allowed = allowed
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._resolver.resolve(host, port, family)
        permitted = [candidate for candidate in addresses if self._allowed(ipaddress.ip_address(candidate["host"]))]
        if not permitted:
            raise _Forbidden(host)
        return permitted

    async def close(self) -> None:
        await self._resolver.close()


def _check_literal(address: URL, allowed: Callable[[Address], bool]) -> None:
    """Raise `_Forbidden` if the host in a URL is an IP address that is not allowed."""
    # The HTTP client does not call `_GuardedResolver` for IP addresses.
    try:
        literal = ipaddress.ip_address(address.host or "")
    except ValueError:
        return
    if not allowed(literal):
        raise _Forbidden(str(literal))


async def _page(response: aiohttp.ClientResponse) -> Page:
    kind = response.content_type
    if not kind.startswith("text/") and not kind.endswith(_TEXT_TYPES):
        raise ToolError(f"{response.url} is {kind}, not text; fetch another page")
    data = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        data += chunk
        if len(data) > _MAX_PAGE_BYTES:
            break
    try:
        text = data[:_MAX_PAGE_BYTES].decode(response.charset or "utf-8", errors="replace")
    except LookupError:
        text = data[:_MAX_PAGE_BYTES].decode(errors="replace")
    if kind in ("text/html", "application/xhtml+xml"):
        text = html_to_text(text)
    return Page(str(response.url), response.status, text, truncated=len(data) > _MAX_PAGE_BYTES)


def html_to_text(html: str) -> str:
    """Return the text of an HTML page.

    Each block element is on a separate line, and link URLs are in parentheses.
    """
    reader = _TextExtractor()
    reader.feed(html)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.pieces).split("\n"))
    return "\n".join(line for line in lines if line)


_WITHIN_LINES = "a abbr b bdi cite code em i kbd mark q s samp small span strong sub sup time u var"
_INLINE = frozenset(_WITHIN_LINES.split())


class _TextExtractor(HTMLParser):
    _UNSEEN = frozenset(["script", "style", "noscript", "template", "svg", "iframe"])

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._hidden = 0
        self._links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        if tag in self._UNSEEN:
            self._hidden += 1
        elif tag == "a":
            self._links.append(dict(attrs).get("href") or "")
        elif tag not in _INLINE:
            self.pieces.append("\n- " if tag == "li" else "\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._UNSEEN:
            self._hidden = max(0, self._hidden - 1)
        elif tag == "a" and self._links:
            link = self._links.pop()
            if link.startswith(("http://", "https://", "/")):
                self.pieces.append(f" ({link})")
        elif tag not in _INLINE:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.pieces.append(data.replace("\n", " "))


_MAX_TEXT_BYTES = 48_000


class _Arguments(Arguments):
    url: Annotated[
        str, Meta(description="URL of the page. Example: `https://docs.python.org/3/`.", min_length=1, max_length=2000)
    ]


class Fetch(BuiltIn):
    """The tool `fetch`, which returns a web page as text."""

    name = "fetch"
    description = "Read a page of the public web as text."
    kind: ToolKind = "fetch"
    arguments = _Arguments

    def title(self, arguments: dict[str, Any], context: ToolContext) -> str:
        """Return a title with the URL of the page."""
        return f"Fetch {title(arguments['url'])}"

    async def preview(self, arguments: dict[str, Any], context: ToolContext) -> tuple[CardContent, ...]:
        """Return the whole URL for the permission request; the title may be cut off."""
        return (Text(fenced(shown_whole(arguments["url"]))),)

    def act(self, arguments: dict[str, Any], context: ToolContext) -> Act:
        """Return the effect of the call: it sends a request to a host (`Fetches`)."""
        return Fetches(parse_url(arguments["url"]).host or "")

    async def run(self, arguments: dict[str, Any], context: ToolContext, progress: Progress) -> ToolOutcome:
        """Fetch the page, and return its text for the model."""
        page = await fetch_page(arguments["url"])
        text = clipped(page.text, _MAX_TEXT_BYTES) + ("\n[the page goes on]" if page.truncated else "")
        if page.status >= 400:
            raise ToolError(f"{page.url} answered with status {page.status}; check the URL: {clipped(page.text, 1000)}")
        return ToolOutcome(f"{page.url}\n\n{text}")
