"""The `cortex` command as a process."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import pytest

from cortex import fake_node
from cortex.cortex_process import run, serving
from cortex.fake_node import FakeNode
from cortex.running_gateway import JSON_HEADERS, eventually
from ports import free_port


@pytest.fixture
def config(tmp_path: Path, node: FakeNode) -> Path:
    (tmp_path / "models.toml").write_text('[[models]]\nid = "Org/Cold"\n[aliases]\nsmall = "Org/M"\n')
    path = tmp_path / "cortex.toml"
    path.write_text(
        'models_config = "models.toml"\n[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\n'
        f'[ledger]\nurl = "sqlite:{tmp_path / "cortex.db"}"\n'
        f'[[neurons]]\nname = "n1"\nendpoint = "{node.url}"\n'
    )
    return path


async def is_ok(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(f"{url}/health") as response:
            return (await response.json())["status"] == "ok"
    except aiohttp.ClientConnectionError:
        return False


async def test_status_command_lists_served_models(config: Path) -> None:
    async with serving(config) as (process, url, metrics_url), aiohttp.ClientSession(headers=JSON_HEADERS) as client:
        await eventually(lambda: is_ok(client, url))
        async with client.post(f"{url}/v1/chat/completions", json={"model": "small"}) as response:
            assert response.status == 200
        async with client.get(metrics_url) as response:
            assert "cortex_requests_total" in await response.text()
        code, out, err = await run("status", "-e", f"{url}/")
        assert (code, err) == (0, "")
        health, end = json.JSONDecoder().raw_decode(out)
        assert health["status"] == "ok"
        assert out[end:].splitlines()[1:] == ["Org/Cold", f"{'Org/M':<40} n1(loaded)", f"{'small':<40} n1(loaded)"]
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


async def test_admin_commands_change_nodes_and_keys_of_a_running_gateway(config: Path) -> None:
    async with (
        serving(config, CORTEX_ENTITLEMENTS__REQUIRE_AUTH="true") as (_, url, _),
        aiohttp.ClientSession(headers=JSON_HEADERS) as client,
    ):

        async def create_key(*options: str) -> dict[str, str]:
            code, out, _ = await run("keys", "create", "-c", str(config), "--json", *options)
            assert code == 0
            return json.loads(out)

        async def status(key: str, model: str = "small") -> int:
            body, headers = {"model": model}, {"x-api-key": key}
            async with client.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                return response.status

        async def known(key: str) -> bool:
            return await status(key) == 200

        await eventually(lambda: is_ok(client, url))
        user = await create_key("--account", "alice", "--models", "small", "--rpm", "1000")
        root = await create_key("--account", "ops", "--admin")
        await eventually(lambda: known(user["key"]))
        await eventually(lambda: known(root["key"]))
        assert await status(user["key"], "Org/Cold") == 403

        async def run_with_key(*arguments: str, key: str = root["key"]) -> tuple[int | None, str, str]:
            return await run(*arguments, "-e", url, HELEXA_API_KEY=key)

        code, out, err = await run_with_key("explain", "small")
        assert (code, err, out.splitlines()[0]) == (0, "", "Org/M: warm on n1")
        code, out, err = await run_with_key("top", "--once")
        assert (code, err) == (0, "")
        assert "small" in out and user["key_id"] in out
        assert (await run_with_key("drain", "n1"))[:2] == (
            0,
            "n1 is drained: it gets no new requests or loads until `cortex uncordon n1`\n",
        )
        assert await status(user["key"]) == 503
        assert (await run_with_key("uncordon", "n1"))[0] == 0
        assert await status(user["key"]) == 200
        code, out, err = await run_with_key("cordon", "n1", key=user["key"])
        assert (code, out, err) == (
            1,
            "",
            f"cortex: {url}/api/nodes/n1/cordon: this path requires an admin's API key; the request has a user's key; "
            "create one with `cortex keys create --admin`\n",
        )
        code, out, _ = await run("keys", "revoke", user["key_id"], "-c", str(config))
        assert code == 0

        async def refused() -> bool:
            return await status(user["key"]) == 401

        await eventually(refused)


async def test_sigterm_ends_streams_with_an_error_and_exits_with_code_0(config: Path, node: FakeNode) -> None:
    node.speak = fake_node.never_end
    async with (
        serving(config, CORTEX_GATEWAY__DRAIN_SECS="0.1") as (process, url, _),
        aiohttp.ClientSession(headers=JSON_HEADERS) as client,
    ):
        await eventually(lambda: is_ok(client, url))
        async with client.post(f"{url}/v1/chat/completions", json={"model": "small"}) as response:
            await response.content.readuntil(b"\n\n")
            process.send_signal(signal.SIGTERM)
            *_, error, done, _nothing = (await response.read()).split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert done == b"data: [DONE]"
        assert await process.wait() == 0
        assert process.stderr is not None
        assert b"Traceback" not in await process.stderr.read()
    await eventually(lambda: node.speaking == 0)


@pytest.mark.parametrize("finishes", [True, False])
async def test_sigterm_lets_running_streams_finish_unless_a_second_signal_follows(
    config: Path, node: FakeNode, finishes: bool
) -> None:
    node.speak = fake_node.never_end
    async with (
        serving(config, CORTEX_GATEWAY__DRAIN_SECS="200") as (process, url, _),
        aiohttp.ClientSession(headers=JSON_HEADERS) as client,
    ):
        await eventually(lambda: is_ok(client, url))

        async def readiness() -> tuple[int, bool]:
            async with client.get(f"{url}/health/ready") as response:
                return response.status, (await response.json())["components"]["gateway"]["ready"]

        async def is_draining() -> bool:
            return await readiness() == (503, False)

        assert await readiness() == (200, True)
        async with client.post(f"{url}/v1/chat/completions", json={"model": "small"}) as response:
            await response.content.readuntil(b"\n\n")
            process.send_signal(signal.SIGTERM)
            await eventually(is_draining)
            async with client.post(f"{url}/v1/chat/completions", json={"model": "small"}) as rejected:
                code = (await rejected.json())["error"]["code"]
                assert (rejected.status, code, rejected.headers["retry-after"]) == (503, "shutting_down", "15")
            if finishes:
                node.go_on.set()
            else:
                process.send_signal(signal.SIGTERM)
            rest = await response.read()
        assert (b"shutting_down" in rest) is not finishes
        assert await process.wait() == 0
    await eventually(lambda: node.speaking == 0)


async def test_gateway_prints_a_configuration_error_in_one_line(config: Path, tmp_path: Path) -> None:
    code, out, err = await run("serve", cwd=Path("/"))
    assert (code, out, err.partition(";")[0]) == (78, "", "cortex: cortex.toml: no such file")
    code, _, err = await run("serve", "-c", str(config), "--insecure", "--listen", "a..b:1")
    problem = "cannot listen on a..b:1: the host name is invalid; change gateway.listen"
    assert (code, err.splitlines()[-1]) == (78, f"cortex: {config}: {problem}")
    assert "Traceback" not in err
    (tmp_path / "models.toml").write_text("nonsense")
    code, _, err = await run("serve", "-c", str(config))
    assert (code, err.count("\n")) == (78, 1)
    assert "models.toml" in err


async def test_listening_on_a_network_address_requires_keys_or_option_insecure(config: Path) -> None:
    code, out, err = await run("serve", "-c", str(config), "--listen", "0.0.0.0:0")
    assert (code, out, err.count("\n")) == (78, "", 1)
    for remedy in ("127.0.0.1", "entitlements.require_auth", "--insecure"):
        assert remedy in err
    for options, variables in (
        (["--insecure"], {}),
        ([], {"CORTEX_ENTITLEMENTS__REQUIRE_AUTH": "true"}),
        ([], {"CORTEX_GATEWAY__INSECURE": "true"}),
    ):
        async with serving(config, "--listen", "0.0.0.0:0", *options, **variables) as (process, _, _):
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


async def test_status_command_exits_with_code_3_if_the_gateway_is_unreachable() -> None:
    port = free_port()
    code, out, err = await run("status", "--endpoint", f"http://127.0.0.1:{port}")
    assert (code, out, err.count("\n")) == (3, "", 1)


@pytest.mark.parametrize(
    "response_bytes", [b"SSH-2.0-x\r\n", b"HTTP/1.0 200 OK\r\n\r\n{}", b'HTTP/1.0 200 OK\r\n\r\n{"data":[{"id":"m"}]}']
)
async def test_status_command_on_a_server_that_is_not_a_gateway_prints_one_line(response_bytes: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(response_bytes)
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        code, out, err = await run("status", "-e", f"http://127.0.0.1:{port}")
    assert (code, out, err.count("\n")) == (3 if response_bytes.startswith(b"SSH") else 1, "", 1)
    assert err.startswith("cortex: http://127.0.0.1")


async def test_status_command_ignores_the_http_proxy_variable(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    async with serving(config) as (_, url, _metrics_url):
        code, _out, err = await run("status", "-e", url)
    assert (code, err) == (0, "")


async def test_option_help_of_the_gateway_imports_no_server_packages() -> None:
    heavy = {"aiohttp", "pydantic", "starlette", "httptools"}
    script = f"import sys, helexa.cortex.cli; print(sorted({heavy} & set(sys.modules)))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=PIPE)
    stdout, _ = await process.communicate()
    assert stdout.strip() == b"[]"
