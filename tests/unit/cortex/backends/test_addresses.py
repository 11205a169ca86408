"""Base URLs and model names in the spellings that clients and backends use."""

import json
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex
from helexa.core.address import base_url, without_api_path
from helexa.cortex.config import NeuronSection

ASK: dict[str, Any] = {"model": "Org/M", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("endpoint", "base"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1"),
        ("http://h:1/v1/v1", "http://h:1"),
        ("http://h:1//v1//", "http://h:1"),
        ("https://h/api/v1", "https://h/api"),
        ("http://h:1/v1/chat/completions", "http://h:1"),
        ("http://h:1/v1/models", "http://h:1"),
        ("http://h:1/v10", "http://h:1/v10"),
        ("http://v1", "http://v1"),
    ],
)
def test_node_endpoint_may_end_in_the_api_path(endpoint: str, base: str) -> None:
    assert without_api_path(base_url(endpoint)) == base
    assert NeuronSection(name="n", endpoint=endpoint).endpoint == base


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/",
        "/v1/v1/chat/completions",
        "/chat/completions",
        "/v1/v1/messages",
        "/messages",
        "/v1/responses/",
        "/v1/v1/messages/count_tokens",
    ],
)
async def test_request_paths_from_common_wrong_base_urls_are_accepted(cortex: Cortex, path: str) -> None:
    body = ASK if "messages" in path else ASK | {"input": "Hi"}
    async with cortex.client.post(cortex.url + path, data=json.dumps(body)) as response:
        assert response.status in (200, 502), await response.text()  # the fake node answers no Messages stream


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/v1/models", "/models"])
async def test_model_list_is_served_at_paths_from_common_wrong_base_urls(cortex: Cortex, path: str) -> None:
    assert [entry["id"] for entry in (await cortex.get(path))["data"]] == ["Org/M", "small"]


@pytest.mark.parametrize(
    "path",
    [
        "/v2/chat/completions",
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/chat",
        "/api/chat/completions",
        "/v1/nodes",
    ],
)
async def test_request_paths_that_fit_no_common_wrong_base_url_are_404(cortex: Cortex, path: str) -> None:
    async with cortex.client.post(cortex.url + path, data=json.dumps(ASK)) as response:
        assert response.status == 404


async def test_path_with_a_doubled_slash_gets_an_error_that_names_the_fix(cortex: Cortex) -> None:
    async with cortex.client.post(f"{cortex.url}//v1/messages", data=json.dumps(ASK)) as response:
        assert "must not end in a slash" in (await response.json())["error"]["message"]


async def test_model_of_an_ollama_backend_is_found_without_its_tag_latest() -> None:
    async with FakeNode().holds("qwen3:latest").serving() as node:
        settings = {"neurons": [{"name": "n1", "endpoint": f"{node.url}/v1", "kind": "openai"}]}
        async with running_cortex(node, settings=settings) as cortex:
            status, body = await cortex.ask("qwen3")
            assert status == 200, body
            assert json.loads(node.bodies[0])["model"] == "qwen3:latest"
            assert (await cortex.ask("qwen"))[0] == 404
