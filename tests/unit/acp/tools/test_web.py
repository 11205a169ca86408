"""fetch: public pages as text; addresses of this machine and its network are rejected."""

import ipaddress
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web as server

from helexa.acp.host import ToolError
from helexa.acp.tools import web

_HTML = "<title>T</title><script>evil()</script><h1>Head</h1><p>a &amp; <b>b</b><br>c <a href='/x'>d</a><li>e"
_PUBLIC = ipaddress.ip_address("127.0.0.1")  # these tests treat this address as public


def allowed(address: web.Address) -> bool:
    return address == _PUBLIC


@pytest.fixture
async def site() -> AsyncIterator[str]:
    """Start a server with pages, redirects and large responses; return its URL."""

    async def page(request: server.Request) -> server.StreamResponse:
        match request.path:
            case "/page":
                return server.Response(text=_HTML, content_type="text/html")
            case "/near":
                raise server.HTTPFound("/page")
            case "/loop":
                raise server.HTTPFound("/loop")
            case "/far":
                raise server.HTTPFound(f"http://localhost:{request.url.port}/page")
            case "/inside":
                raise server.HTTPFound(f"http://127.0.0.2:{request.url.port}/page")
            case "/file":
                raise server.HTTPFound("file:///etc/passwd")
            case "/picture":
                return server.Response(body=b"\x89PNG", content_type="image/png")
            case "/strange":
                return server.Response(body=b"\xff\xe4", headers={"Content-Type": "text/plain; charset=no-such"})
            case "/endless":
                response = server.StreamResponse(headers={"Content-Type": "text/plain"})
                await response.prepare(request)
                while True:
                    await response.write(b"x" * (1 << 16))
        return server.Response(status=404, text="nothing here")

    app = server.Application()
    app.router.add_get("/{path:.*}", page)
    runner = server.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await server.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_fetch_tool_returns_a_web_page_as_text(site: str) -> None:
    page = await web.fetch_page(f"{site}/near#part", allowed)
    assert page.url == f"{site}/page" and page.status == 200 and not page.truncated
    assert page.text == "T\nHead\na & b\nc d (/x)\n- e"
    assert (await web.fetch_page(f"{site}/strange", allowed)).text == "\ufffd\ufffd"
    assert (await web.fetch_page(f"{site}/absent", allowed)).status == 404


async def test_fetched_page_is_limited_in_size_type_and_number_of_redirects(site: str) -> None:
    page = await web.fetch_page(f"{site}/endless", allowed)
    assert page.truncated and len(page.text) == 2 << 20
    with pytest.raises(ToolError, match="more than 5 times"):
        await web.fetch_page(f"{site}/loop", allowed)
    with pytest.raises(ToolError, match="image/png, not text"):
        await web.fetch_page(f"{site}/picture", allowed)


@pytest.mark.parametrize(
    ("path", "message"), [("/far", "another host"), ("/inside", "another host"), ("/file", "not an http")]
)
async def test_redirect_of_a_page_to_another_host_is_rejected(site: str, path: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        await web.fetch_page(site + path, allowed)


_WITHIN = """
    127.0.0.1 localhost [::1] 127.1 2130706433 0x7f.1 0.0.0.0 169.254.169.254 10.0.0.1 192.168.1.1 224.0.0.1
    [::ffff:127.0.0.1] [fe80::1] [fd00::1] [64:ff9b::7f00:1] [2002:7f00:1::]
"""


@pytest.mark.parametrize("host", _WITHIN.split())
async def test_local_and_private_addresses_are_rejected(site: str, host: str) -> None:
    port = site.rpartition(":")[2]
    with pytest.raises(ToolError, match=r"not on the public internet|cannot be fetched|not an http"):
        await web.fetch_page(f"http://{host}:{port}/page")


@pytest.mark.parametrize(
    "url", ["", "file:///etc/passwd", "ftp://a/b", "http://", "http://user:key@a/", "//a/b", "http://a:0/"]
)
def test_invalid_page_url_is_rejected(url: str) -> None:
    with pytest.raises(ToolError, match="not an http"):
        web.parse_url(url)


def test_public_ipv4_and_ipv6_addresses_are_classified_as_public() -> None:
    assert web.is_public(ipaddress.ip_address("8.8.8.8"))
    assert web.is_public(ipaddress.ip_address("2001:4860:4860::8888"))
    assert web.is_public(ipaddress.ip_address("64:ff9b::808:808"))


async def test_error_of_the_fetch_tool_names_the_cause(workplace: Any) -> None:
    assert "not on the public internet" in await workplace.failure("fetch", url="http://localhost:1/")


def test_deeply_nested_html_is_converted_to_text() -> None:
    assert web.html_to_text("<div>" * 100_000 + "deep") == "deep"
