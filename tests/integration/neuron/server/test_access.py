"""Requests from web pages, and requests without the node's key, to a node on a real socket."""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from cortex.running_gateway import eventually, running_cortex
from helexa.core.errors import ConfigError
from helexa.core.node_reports import ModelSpec
from helexa.cortex.fleet.node_client import NodeClient
from helexa.cortex.fleet.node_errors import NodeError
from helexa.cortex.node_join import prove
from helexa.cortex.upstream.client import Upstream
from helexa.neuron.config import NeuronConfig, exposure, read_config
from neuron.fake_models import make_model
from neuron.running_node import Node, running
from ports import free_port

PAGE = "https://evil.example"
on_shared_node = pytest.mark.asyncio(loop_scope="module")
NETWORK = {"NEURON_HOST": "0.0.0.0"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """A node with default settings and one loaded model. It rejects all requests that would change it."""
    async with running({}) as node:
        assert (await node.load(make_model(tmp_path_factory.mktemp("node"))))[0] == 200
        yield node


async def unload(node: Node, **headers: str) -> tuple[int, str | None]:
    """Return the status and error code of `POST /models/unload` with `headers`. The default content type is JSON."""
    header_fields = {name.replace("_", "-"): value for name, value in headers.items()}
    code, body = await node.post("/models/unload", {"model_id": "org/tiny"}, **header_fields)
    error = body.get("error")
    return code, error.get("code") if isinstance(error, dict) else None


async def loaded(node: Node) -> list[str]:
    return [model["id"] for model in (await node.get("/models"))[1]]


def spec(path: Path) -> ModelSpec:
    return ModelSpec(model_id="org/tiny", source=f"file:{path}")


async def completion_through_a_gateway(
    node: Node, bearer: str | None = None, gateway: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> int:
    """Return the status of a completion of `org/tiny` through a gateway."""
    assert node.app is not None
    node.app.state.port = int(node.url.rpartition(":")[2])  # the port that the node reports to gateways
    neuron = {"name": "node", "endpoint": node.url, "bearer": bearer}
    async with running_cortex(ready=False, settings={"neurons": [neuron], "gateway": gateway or {}}) as cortex:

        async def is_served() -> bool:
            return any(model["id"] == "org/tiny" for model in (await cortex.get("/v1/models"))["data"])

        await eventually(is_served)
        body = json.dumps({"model": "org/tiny", "prompt": [1, 3], "max_tokens": 2})
        header_fields = {"content-type": "application/json"} | (headers or {})
        async with cortex.client.post(f"{cortex.url}/v1/completions", data=body, headers=header_fields) as response:
            return response.status


@on_shared_node
@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
@pytest.mark.parametrize("path", ["/models/unload", "/models/load", "/v1/chat/completions", "/tokenize"])
async def test_post_without_json_content_type_is_415(node: Node, path: str, content_type: str) -> None:
    body = {"model_id": "org/tiny", "model": "org/tiny", "messages": [{"role": "user", "content": "Hi"}]}
    code, answer = await node.post(path, body, **{"content-type": content_type})
    assert (code, answer["error"]["code"]) == (415, "unsupported_media_type")
    assert await loaded(node) == ["org/tiny"]


@on_shared_node
async def test_post_without_any_content_type_header_is_415(node: Node) -> None:
    body = json.dumps({"model_id": "org/tiny"}).encode()
    request = node.session.post(f"{node.url}/models/unload", data=body, skip_auto_headers=("content-type",))
    async with request as response:
        assert (response.status, (await response.json())["error"]["code"]) == (415, "unsupported_media_type")
    assert await loaded(node) == ["org/tiny"]


@on_shared_node
@pytest.mark.parametrize("origin", [PAGE, "null", "http://127.0.0.1:1", "http://localhost.evil.example", "file://"])
async def test_request_from_a_web_page_of_another_origin_is_403(node: Node, origin: str) -> None:
    assert await unload(node, origin=origin) == (403, "origin_not_allowed")
    async with node.session.get(f"{node.url}/v1/models", headers={"origin": origin}) as response:
        assert response.status == 403
    assert await loaded(node) == ["org/tiny"]


@on_shared_node
@pytest.mark.parametrize(
    "host", ["evil.example", "EVIL.example:13131", "localhost.evil.example", "127.0.0.1.evil.example", "internal"]
)
async def test_foreign_host_header_on_a_loopback_address_is_403(node: Node, host: str) -> None:
    assert await unload(node, host=host) == (403, "host_not_allowed")
    assert await unload(node, host=host, origin=f"http://{host}") == (403, "host_not_allowed")
    async with node.session.get(f"{node.url}/models", headers={"host": host}) as response:
        assert "allowed_hosts" in (await response.json())["error"]["message"]
    assert await loaded(node) == ["org/tiny"]


@on_shared_node
@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:9",
        "localhost.:9",
        "127.0.0.1",
        "127.1.2.3:9",
        "[::1]:9",
        "10.0.0.1",
        socket.gethostname(),
        "host.docker.internal:9",
        "node.localhost",
    ],
)
async def test_host_headers_that_name_this_machine_are_accepted(node: Node, host: str) -> None:
    async with node.session.get(f"{node.url}/models", headers={"host": host}) as response:
        assert response.status == 200
    async with node.session.get(f"{node.url}/models", headers={"host": host, "origin": f"http://{host}"}) as response:
        assert response.status == 200


async def test_host_headers_listed_in_allowed_hosts_are_accepted() -> None:
    async with running({"NEURON_ALLOWED_HOSTS": '["Beast.lan"]'}) as node:
        for host, status in (("beast.lan:13131", 200), ("other.lan", 403)):
            async with node.session.get(f"{node.url}/models", headers={"host": host}) as response:
                assert response.status == status


@pytest.mark.parametrize("host", ["beast.lan:13131", "neuron.default.svc.cluster.local"])
async def test_node_on_a_network_accepts_any_host_name(host: str) -> None:
    async with running(NETWORK) as node:
        async with node.session.get(f"{node.url}/models", headers={"host": host}) as response:
            assert response.status == 200
        assert await unload(node, host=host) == (404, None)  # accepted; the model does not exist


async def test_node_on_a_network_address_rejects_web_pages_with_a_foreign_host_name() -> None:
    async with running(NETWORK) as node:
        assert await unload(node, origin=PAGE) == (403, "origin_not_allowed")
        assert await unload(node, host="evil.example", origin="http://evil.example") == (403, "host_not_allowed")


async def test_request_by_which_a_gateway_checks_for_a_key_is_not_logged_as_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A gateway adds a node only if the node rejects a wrong key. A warning about this key looks like a failure."""
    caplog.set_level(logging.INFO, "helexa")
    async with running({"NEURON_API_KEY": "secret-1"}) as node:
        client = NodeClient(upstream := Upstream())
        await prove(client, node.url, "secret-1")
        async with node.session.get(f"{node.url}/discovery", headers={"authorization": "Bearer secret-2"}) as response:
            assert response.status == 401
        upstream.close()
    levels = [record.levelname for record in caplog.records if "path=/discovery" in record.getMessage()]
    assert levels.count("WARNING") == 1, "the wrong key that no gateway has sent"
    assert any(
        "gateway checks that a key is required path=/discovery" in record.getMessage() for record in caplog.records
    )


async def test_node_that_requires_a_key_serves_only_health_without_the_key(tmp_path: Path) -> None:
    async with running({"NEURON_API_KEY": "secret-1"}) as node:
        for headers in ({}, {"authorization": "Bearer secret-2"}, {"authorization": "Basic secret-1"}):
            assert await unload(node, **headers) == (401, "invalid_api_key")
            for path in ("/models", "/metrics", "/discovery", "/v1/models"):
                async with node.session.get(node.url + path, headers=headers) as response:
                    assert response.status == 401
            assert (await node.get("/health"))[0] == 200
            assert (await node.get("/health/ready"))[0] == 200
        key = {"authorization": "Bearer secret-1"}
        source = f"file:{make_model(tmp_path)}"
        assert (await node.post("/models/load", {"model_id": "org/tiny", "source": source}, **key))[0] == 200
        assert await unload(node, **key) == (200, None)


@pytest.fixture
async def node_upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    yield upstream
    upstream.close()


async def test_key_sent_by_a_gateway_as_bearer_token_is_accepted(tmp_path: Path, node_upstream: Upstream) -> None:
    async with running({"NEURON_API_KEY": "secret-1"}) as node:
        client = NodeClient(node_upstream)
        await client.load(node.url, spec(make_model(tmp_path)), "secret-1")
        assert await completion_through_a_gateway(node, "secret-1") == 200
        await client.unload(node.url, "org/tiny", "secret-1")
        with pytest.raises(NodeError, match="401"):
            await client.models(node.url, "secret-2")


async def test_gateway_loads_uses_and_unloads_a_model_on_a_node_with_default_settings(
    tmp_path: Path, node_upstream: Upstream
) -> None:
    async with running({}) as node:
        client = NodeClient(node_upstream)
        await client.load(node.url, spec(make_model(tmp_path)))
        assert await completion_through_a_gateway(node) == 200
        await client.unload(node.url, "org/tiny")
        assert await loaded(node) == []


@on_shared_node
async def test_request_from_an_origin_allowed_by_the_gateway_reaches_the_node(node: Node) -> None:
    browser = {"origin": PAGE, "sec-fetch-site": "cross-site"}
    assert await completion_through_a_gateway(node, gateway={"cors_origins": [PAGE]}, headers=browser) == 200


def test_empty_api_key_is_rejected_and_the_key_is_never_printed() -> None:
    with pytest.raises(ConfigError, match="api_key"):
        read_config(None, {"NEURON_API_KEY": ""})
    assert "secret-1" not in repr(read_config(None, {"NEURON_API_KEY": "secret-1"}))


def test_api_key_file_is_relative_to_the_configuration_and_overridden_by_a_key_variable(tmp_path: Path) -> None:
    (tmp_path / "node.key").write_text("secret-1\n")
    path = tmp_path / "neuron.toml"
    path.write_text('api_key_file = "node.key"\n')
    for environ, expected in (({}, "secret-1"), ({"NEURON_API_KEY": "secret-2"}, "secret-2")):
        key = read_config(path, environ).api_key
        assert key is not None
        assert key.get_secret_value() == expected


@pytest.mark.parametrize(
    ("environ", "is_exposed"),
    [
        ({}, False),
        ({"NEURON_HOST": "::1"}, False),
        (NETWORK, True),
        ({"NEURON_HOST": "beast.lan"}, True),
        (NETWORK | {"NEURON_API_KEY": "secret-1"}, False),
    ],
)
def test_node_on_a_network_address_without_a_key_counts_as_exposed(environ: dict[str, str], is_exposed: bool) -> None:
    assert (exposure(read_config(None, environ)) is not None) == is_exposed


def test_node_listens_on_the_loopback_address_by_default() -> None:
    assert NeuronConfig().host == "127.0.0.1"
    address, log = started()
    assert (address, "other machines" in log) == ("127.0.0.1", False)


def test_exposed_node_without_a_key_logs_one_warning() -> None:
    address, log = started("--host", "0.0.0.0")
    assert (address, log.count("other machines can connect to 0.0.0.0:")) == ("0.0.0.0", 1)


def started(*options: str) -> tuple[str, str]:
    """The address that `neuron` listens on, and what it logs from its start to its end."""
    port = free_port()
    command = [sys.executable, "-m", "helexa.neuron", "--port", str(port), *options]
    with subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        while not lines or "listening url=" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], "neuron ended before it listened"
        (connection,) = [
            one for one in psutil.Process(process.pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN
        ]
        process.terminate()
        return connection.laddr.ip, "".join([*lines, process.stderr.read()])
