"""The virtual host in `deploy/nginx`: a real nginx with TLS in front of a gateway."""

import asyncio
import json
import os
import ssl
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from pydantic import SecretStr

from cortex import fake_node
from cortex.fake_node import FakeNode
from cortex.running_gateway import eventually, running_cortex
from deployment.conftest import DEPLOY, adapted
from helexa.cli.terminal_output_and_errors import UNREACHABLE
from helexa.core.errors import HelexaError
from helexa.neuron.join import JoinRequest, UnreachableError
from ports import free_port

KEY = "the-key"
CLIENT = "127.0.0.2"  # address of the client, other than that of nginx
SETTINGS = {
    "gateway": {"max_body_mb": 64, "trusted_proxies": ["127.0.0.1"]},
    "entitlements": {"require_auth": True, "keys": [{"key": KEY, "account_id": "acme", "role": "admin"}]},
}
MAIN = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {host}
}}
"""


@dataclass
class Front:
    """A running nginx.

    Attributes:
        url: base URL of the TLS listener.
        certificate: file with the self-signed certificate.
        plain_url: base URL of the listener without TLS.
        client: an HTTP client that trusts the certificate and sends the key.
    """

    url: str
    certificate: Path
    plain_url: str
    client: aiohttp.ClientSession

    def chat(self, data: bytes | None = None, **fields: object) -> aiohttp.client._RequestContextManager:
        body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return self.client.post(f"{self.url}/v1/chat/completions", data=BytesIO(data or json.dumps(body).encode()))


async def run(*command: str | Path) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


@asynccontextmanager
async def nginx(command: str, folder: Path, gateway_url: str) -> AsyncIterator[Front]:
    """Run nginx with the shipped virtual host in front of a gateway."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    await run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
              "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key,
              "-out", certificate)  # fmt: skip
    tls, plain = free_port(), free_port()
    host = adapted(
        (DEPLOY / "nginx" / "helexa.conf").read_text(),
        {
            "listen 443 ": f"listen 127.0.0.1:{tls} ",
            "listen 80;": f"listen 127.0.0.1:{plain};",
            "server 127.0.0.1:31313;": f"server {gateway_url.removeprefix('http://')};",
            "/etc/ssl/helexa/fullchain.pem": str(certificate),
            "/etc/ssl/helexa/privkey.pem": str(key),
            "llm.example.com": "localhost",
        },
    )
    config = folder / "nginx.conf"
    config.write_text(MAIN.format(folder=folder, host=host))
    await run(command, "-t", "-c", config)
    process = await asyncio.create_subprocess_exec(command, "-c", str(config))
    trust = ssl.create_default_context(cafile=str(certificate))
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    try:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trust, local_addr=(CLIENT, 0)), headers=headers
        ) as client:
            front = Front(f"https://localhost:{tls}", certificate, f"http://localhost:{plain}", client)

            async def answers() -> bool:
                try:
                    async with client.get(f"{front.url}/health/ready"):
                        return True
                except aiohttp.ClientConnectionError:
                    assert process.returncode is None
                    return False

            await eventually(answers)
            yield front
    finally:
        process.terminate()
        await process.wait()


@pytest.fixture
async def front(program: Callable[[str, str], str], tmp_path: Path, node: FakeNode) -> AsyncIterator[Front]:
    command = program("nginx", "nginx-light")
    async with running_cortex(node, settings=SETTINGS) as cortex, nginx(command, tmp_path, cortex.url) as front:
        yield front


async def test_nginx_forwards_each_token_without_buffering(front: Front, node: FakeNode) -> None:
    received = [asyncio.Event() for _ in range(5)]

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        response = await fake_node.begin(request, fake_node.ROLE)
        for number, event in enumerate(received):
            await response.write(fake_node.chunk(f"token-{number}"))
            await event.wait()
        await response.write(fake_node.FINAL + fake_node.DONE)
        return response

    node.speak = speak
    async with front.chat(stream=True) as response:
        assert response.status == 200
        for number, event in enumerate(received):
            await response.content.readuntil(b"token-%d" % number)
            event.set()
        assert (await response.read()).endswith(fake_node.DONE)


async def test_disconnect_from_nginx_ends_the_request_at_the_node(front: Front, node: FakeNode) -> None:
    node.speak = fake_node.never_end
    async with front.chat(stream=True) as response:
        await response.content.readuntil(b"\n\n")
        assert node.speaking == 1
        # As when the client's process ends. `close` would wait for nginx's end of the TLS session.
        assert response.connection is not None and response.connection.transport is not None
        response.connection.transport.abort()
    await eventually(lambda: node.speaking == 0)


async def test_upload_of_64_mib_passes_and_a_larger_one_gets_a_json_error(front: Front, node: FakeNode) -> None:
    head, tail = b'{"model":"Org/M","messages":[{"role":"user","content":"', b'"}]}'
    body = head + b"a" * ((64 << 20) - len(head) - len(tail)) + tail
    async with front.chat(data=body) as response:
        assert response.status == 200, await response.text()
    assert len(node.bodies[-1]) == 64 << 20
    async with front.chat(data=body + b" ") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (413, "request_too_large")


async def test_client_cannot_fake_its_address_with_x_forwarded_for(front: Front) -> None:
    async with front.client.post(
        f"{front.url}/v1/chat/completions",
        json={"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}]},
        headers={"x-forwarded-for": "203.0.113.7"},
    ) as response:
        assert response.status == 200

    async def is_logged() -> bool:
        async with front.client.get(f"{front.url}/api/activity") as response:
            rows = (await response.json())["requests"]
        assert all(row["client"] == CLIENT for row in rows)
        return len(rows) == 1

    await eventually(is_logged)


async def test_browser_signs_in_to_the_console_through_nginx(front: Front) -> None:
    headers = {"origin": front.url}
    async with front.client.post(f"{front.url}/api/session", json={"key": KEY}, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert "secure" in response.headers["set-cookie"].lower()
    async with front.client.get(front.url, headers={"accept": "text/html"}) as response:
        assert response.content_type == "text/html"


async def test_helexa_commands_reach_an_https_gateway_only_with_its_certificate_authority(front: Front) -> None:
    async def status(**settings: str) -> tuple[int | None, str]:
        environment = {name: value for name, value in os.environ.items() if name != "SSL_CERT_FILE"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "helexa", "status", "--url", front.url, stdout=PIPE, stderr=STDOUT,
            env=environment | {"HELEXA_API_KEY": KEY} | settings)  # fmt: skip
        output, _ = await process.communicate()
        return process.returncode, output.decode()

    code, output = await status()
    assert code == UNREACHABLE
    assert "set SSL_CERT_FILE to a file with the CA" in output
    code, output = await status(SSL_CERT_FILE=str(front.certificate))
    assert code == 0, output
    assert "ready to serve" in output


async def test_node_joins_the_gateway_through_tls(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front.client.post(f"{front.url}/api/invitations", json={}) as response:
        token = (await response.json())["token"]
    async with FakeNode(name="new", key="key-of-the-node").serving() as new:
        request = JoinRequest(front.url, SecretStr(token), "new", new.url, SecretStr("key-of-the-node"))
        with pytest.raises(UnreachableError, match="set SSL_CERT_FILE to a file with the CA"):
            await asyncio.to_thread(request.send)
        monkeypatch.setenv("SSL_CERT_FILE", str(front.certificate))
        assert await asyncio.to_thread(request.send) == new.url
        with pytest.raises(HelexaError, match="the token is wrong, used or expired"):
            await asyncio.to_thread(request.send)


async def test_plain_http_request_is_redirected_to_https_with_method_and_path(front: Front) -> None:
    url = f"{front.plain_url}/v1/chat/completions?a=b"
    async with front.client.post(url, data="{}", allow_redirects=False) as response:
        assert (response.status, response.headers["location"]) == (308, "https://localhost/v1/chat/completions?a=b")


async def test_nginx_answers_for_a_stopped_gateway_with_a_json_error(
    program: Callable[[str, str], str], tmp_path: Path, node: FakeNode
) -> None:
    command = program("nginx", "nginx-light")
    async with nginx(command, tmp_path, f"http://127.0.0.1:{free_port()}") as front, front.chat() as response:
        assert (response.status, response.headers["retry-after"]) == (503, "5")
        assert (await response.json())["error"]["code"] == "service_unavailable"
