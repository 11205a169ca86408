"""Fetching of images over real sockets: addresses, redirects, sizes and time limits."""

import asyncio
import gzip
import ipaddress
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from cortex.images.image_server import PNG, PNG_URL, ImageServer, image_server
from helexa.core.errors import ApiError
from helexa.cortex.config import ImagesSection
from helexa.cortex.image_fetcher import MAX_REDIRECTS, MAX_WAITING, FetchMemory, ImageFetcher
from helexa.http.service_and_memory_budget import BodyBudget

LOOPBACK = ["127.0.0.0/8"]


@pytest.fixture
async def server() -> AsyncIterator[ImageServer]:
    async with image_server() as server:
        yield server


def settings(server: ImageServer, **fields: Any) -> ImagesSection:
    return ImagesSection.model_validate({"allowed_hosts": server.hosts, "private_networks": LOOPBACK} | fields)


async def fetch(section: ImagesSection, *urls: str, bodies: BodyBudget | None = None) -> list[str]:
    memory = FetchMemory(bodies or BodyBudget(), 10 << 20)
    remote = {url: number for number, url in enumerate(urls, 1)}
    try:
        data_urls = await ImageFetcher(section).fetch(remote, memory)
        return [data_urls[url] for url in urls]
    finally:
        memory.release()


async def rejection(section: ImagesSection, url: str, bodies: BodyBudget | None = None) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as rejected:
        await fetch(section, url, bodies=bodies)
    return rejected.value.code, str(rejected.value)


async def test_fetched_image_becomes_a_data_url(server: ImageServer) -> None:
    assert await fetch(settings(server), server.url, f"{server.url}?size=2#part") == [PNG_URL] * 2
    headers = server.requests[0].headers
    assert headers["user-agent"] == "helexa"
    assert headers["accept-encoding"] == "identity"
    assert not {"cookie", "authorization", "referer"} & {name.lower() for name in headers}
    assert {request.rel_url.path_qs for request in server.requests} == {"/a.png", "/a.png?size=2"}


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "0x7f.1", "0.0.0.0", "[::ffff:127.0.0.1]", "[::1]", "[::]"],
)
async def test_image_url_of_a_private_address_is_never_requested(server: ImageServer, host: str) -> None:
    section = settings(server, allowed_hosts=[f"*:{server.port}", "*"], private_networks=[])
    code, message = await rejection(section, f"http://{host}:{server.port}/a.png")
    assert (code, server.requests) == ("invalid_image_url", [])
    assert message == "image 1 of the request: the image URL leads to an address that is not public; send a data URL"


@pytest.mark.parametrize("host", ["127.1", "2130706433"])
async def test_image_url_whose_host_is_a_number_is_never_requested(server: ImageServer, host: str) -> None:
    code, _ = await rejection(settings(server), f"http://{host}:{server.port}/a.png")
    assert (code, server.requests) == ("failed_to_download_image", [])


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com/a.png",
        "http://images.example.com:22/a.png",
        "http://user@127.0.0.1:{port}/a.png",
        "http://:pw@127.0.0.1:{port}/a.png",
        "http://127.0.0.1:{port}@images.example.com/a.png",
        "http:///a.png",
        "http://[::1/a.png",
        "http://127.0.0.1:99999/a.png",
    ],
)
async def test_image_urls_of_disallowed_hosts_or_with_credentials_are_rejected(server: ImageServer, url: str) -> None:
    section = settings(server, allowed_hosts=[f"127.0.0.1:{server.port}"])
    code, _ = await rejection(section, url.format(port=server.port))
    assert (code, server.requests) == ("invalid_image_url", [])


def resolve(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Answer each DNS query of a name under `.test` with the next addresses. Return the list of queried names."""
    queries: list[str] = []
    getaddrinfo = socket.getaddrinfo

    def answer(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if not str(host).endswith(".test"):
            return getaddrinfo(host, port, *args, **options)
        queries.append(host)
        addresses = answers[min(len(queries), len(answers)) - 1]
        families = {4: socket.AF_INET, 6: socket.AF_INET6}
        return [
            (families[ipaddress.ip_address(address).version], socket.SOCK_STREAM, 6, "", (address, port))
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return queries


async def test_host_name_of_an_image_url_is_resolved_once(server: ImageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = resolve(monkeypatch, ["127.0.0.1"], ["10.0.0.1"])
    assert await fetch(settings(server), f"http://images.test:{server.port}/a.png") == [PNG_URL]
    assert queries == ["images.test"]
    assert server.requests[0].headers["host"] == f"images.test:{server.port}"


async def test_next_address_of_a_host_name_is_tried_after_a_refused_connection(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, ["127.0.0.9", "127.0.0.1"])  # the server listens on 127.0.0.1 only
    assert await fetch(settings(server), f"http://images.test:{server.port}/a.png") == [PNG_URL]


async def test_characters_not_allowed_in_urls_are_percent_encoded(server: ImageServer) -> None:
    assert await fetch(settings(server), f"http://127.0.0.1:{server.port}/d/../ü b%2Fc.png?q=ä&r=1 2%#x") == [PNG_URL]
    assert server.requests[0].rel_url.raw_path_qs == "/%C3%BC%20b%2Fc.png?q=%C3%A4&r=1+2%25"


async def test_host_name_with_a_private_address_among_others_is_rejected(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve(monkeypatch, ["127.0.0.1", "10.0.0.1"])
    code, _ = await rejection(settings(server), f"http://images.test:{server.port}/a.png")
    assert (code, server.requests) == ("invalid_image_url", [])


def redirect(target: str) -> Any:
    async def respond(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(target) if "start" in request.path else web.HTTPFound(f"/{request.path}x")

    return respond


@pytest.mark.parametrize("target", ["http://inner.test:{port}/a.png", "//inner.test:{port}/a.png"])
async def test_redirect_to_a_private_address_is_not_followed(
    server: ImageServer, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    resolve(monkeypatch, ["127.0.0.1"], ["10.0.0.1"])
    server.respond = redirect(target.format(port=server.port))
    code, message = await rejection(settings(server), f"http://images.test:{server.port}/start")
    assert (code, len(server.requests)) == ("invalid_image_url", 1)
    assert "not public" in message


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.2:{port}/a.png",
        "http://127.0.0.1:1/",
        "ftp://127.0.0.1/",
        "data:,x",
        "http://user@127.0.0.1:{port}/",
    ],
)
async def test_redirect_to_another_host_is_not_followed(server: ImageServer, target: str) -> None:
    server.respond = redirect(target.format(port=server.port))
    section = settings(server, allowed_hosts=[f"127.0.0.1:{server.port}"])
    code, _ = await rejection(section, f"http://127.0.0.1:{server.port}/start")
    assert (code, len(server.requests)) == ("invalid_image_url", 1)


async def test_relative_redirect_is_followed(server: ImageServer) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        if request.path == "/b/start":
            raise web.HTTPFound("../c.png")
        return web.Response(body=PNG)

    server.respond = respond
    assert await fetch(settings(server), f"http://127.0.0.1:{server.port}/b/start") == [PNG_URL]
    assert [request.path for request in server.requests] == ["/b/start", "/c.png"]


async def test_image_url_with_too_many_redirects_is_rejected(server: ImageServer) -> None:
    server.respond = redirect("/start")
    code, message = await rejection(settings(server), f"http://127.0.0.1:{server.port}/start")
    assert (code, len(server.requests)) == ("failed_to_download_image", MAX_REDIRECTS + 1)
    assert message.endswith(f"redirects more than {MAX_REDIRECTS} times; send the final URL, or a data URL")


async def test_image_above_the_size_limit_is_not_read_to_its_end(server: ImageServer) -> None:
    sent = 0

    async def respond(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(bytes(1 << 16))
            sent += 1 << 16
        return response

    server.respond = respond
    code, message = await rejection(settings(server, max_image_mb=1), server.url)
    assert code == "image_too_large"
    assert message.startswith("image 1 of the request: the image has more than 1048576 bytes")
    assert sent < 30 << 20  # the rest of 64 MiB was not sent, apart from the sockets' buffers


async def test_content_length_above_the_size_limit_is_rejected_before_the_image_is_read(server: ImageServer) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": str(2 << 20)})
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    server.respond = respond
    assert (await rejection(settings(server, max_image_mb=1), server.url))[0] == "image_too_large"


@pytest.mark.parametrize("stage", ["head", "body"])
async def test_fetch_from_a_slow_image_server_is_given_up(server: ImageServer, stage: str) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if stage == "body":
            await response.prepare(request)
        while True:
            await asyncio.sleep(0.01)
            if stage == "body":
                await response.write(b"\x89")

    server.respond = respond
    code, message = await rejection(settings(server, fetch_timeout_secs=0.3), server.url)
    assert code == "failed_to_download_image"
    assert message.startswith("image 1 of the request: the image was not received within 0.3 s; try again")


@pytest.mark.parametrize(
    ("response", "code"),
    [
        (web.Response, "invalid_image_format"),
        (lambda: web.Response(text="<svg/>", content_type="image/png"), "invalid_image_format"),
        (lambda: web.Response(body=gzip.compress(PNG), headers={"content-encoding": "gzip"}), "invalid_image_format"),
        (lambda: web.Response(body=PNG, status=403), "failed_to_download_image"),
        (lambda: web.Response(body=PNG, status=206), "failed_to_download_image"),
    ],
)
async def test_fetched_files_that_are_no_images_are_rejected(server: ImageServer, response: Any, code: str) -> None:
    async def respond(request: web.Request) -> web.StreamResponse:
        return response()

    server.respond = respond
    assert (await rejection(settings(server), server.url))[0] == code


async def test_request_with_an_image_on_an_unreachable_server_fails_with_an_error(server: ImageServer) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        section = settings(server, allowed_hosts=[f"*:{port}"])
        code, message = await rejection(section, f"http://127.0.0.1:{port}/a.png")
    assert (code, message) == (
        "failed_to_download_image",
        "image 1 of the request: the image could not be fetched from its URL; try again, or send a data URL",
    )


async def test_image_above_the_memory_budget_is_rejected_and_memory_is_released(server: ImageServer) -> None:
    bodies = BodyBudget(2 * len(PNG))
    assert (await rejection(settings(server), server.url, bodies))[0] == "rate_limit_exceeded"
    assert bodies.reserved == 0
    bodies.total = 4 * len(PNG)
    await fetch(settings(server), server.url, bodies=bodies)
    assert bodies.reserved == 0


async def test_too_many_images_that_wait_to_be_fetched_are_rejected(server: ImageServer) -> None:
    urls = {f"{server.url}?{number}": number for number in range(MAX_WAITING + 1)}
    with pytest.raises(ApiError) as rejected:
        await ImageFetcher(settings(server)).fetch(urls, FetchMemory(BodyBudget(), 1 << 20))
    assert (rejected.value.status, server.requests) == (503, [])


async def test_first_failed_fetch_of_a_request_ends_its_other_fetches(server: ImageServer) -> None:
    waiting = asyncio.Event()
    ended = asyncio.Event()

    async def respond(request: web.Request) -> web.StreamResponse:
        if request.query_string == "bad":
            await waiting.wait()
            return web.Response(status=404)
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return web.Response()

    server.respond = respond
    fetcher, memory = ImageFetcher(settings(server)), FetchMemory(BodyBudget(), 1 << 20)
    with pytest.raises(ApiError, match=r"^image 2 "):
        await fetcher.fetch({server.url: 1, f"{server.url}?bad": 2}, memory)
    await asyncio.wait_for(ended.wait(), 20)
    server.respond = None
    assert await fetcher.fetch({server.url: 1}, memory) == {server.url: PNG_URL}
