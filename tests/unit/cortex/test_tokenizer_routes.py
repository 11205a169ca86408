"""The tokenizer endpoints through the gateway."""

import json
from typing import Any

import pytest
from aiohttp import web

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex

KEYS = [
    {"key": "all", "account_id": "a", "key_id": "all"},
    {"key": "other", "account_id": "a", "key_id": "other", "models": ["Org/Other"]},
    {"key": "spent", "account_id": "a", "key_id": "spent", "hard_cap": 0},
    {"key": "slow", "account_id": "a", "key_id": "slow", "requests_per_minute": 1},
]
SETTINGS = {"entitlements": {"require_auth": True, "keys": KEYS}}
PATHS = ["/tokenize", "/detokenize", "/v1/responses/input_tokens"]


async def echo(node: FakeNode, request: web.Request) -> web.StreamResponse:
    text = await request.text()
    return web.json_response({"body": json.loads(text) if text else None, "query": request.query_string})


async def ask(cortex: Cortex, path: str, key: str | None = "all", **body: Any) -> tuple[int, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if path == "/tokenizer_info":
        request = cortex.client.get(cortex.url + path, params=body, headers=headers)
    else:
        request = cortex.client.post(cortex.url + path, json=body, headers=headers)
    async with request as response:
        return response.status, await response.json()


@pytest.mark.parametrize("path", PATHS)
async def test_tokenizer_request_goes_to_the_node_with_the_model(node: FakeNode, path: str) -> None:
    node.speak = echo
    async with running_cortex(node, settings=SETTINGS, aliases={"small": "Org/M"}) as cortex:
        for name in ("Org/M", "small"):
            status, content = await ask(cortex, path, model=name, prompt="hi", tokens=[1])
            assert (status, content["body"]) == (200, {"model": "Org/M", "prompt": "hi", "tokens": [1]})
        assert node.headers[-1]["x-helexa-key-id"] == "all"
        status, content = await ask(cortex, path, prompt="hi")
        assert (status, content["body"]["model"]) == (200, "Org/M")  # the only model


async def test_third_party_backend_gets_no_helexa_identity_headers(node: FakeNode) -> None:
    node.speak = echo
    settings = SETTINGS | {"neurons": [{"name": "n1", "endpoint": node.url, "kind": "openai"}]}
    async with running_cortex(node, settings=settings) as cortex:
        assert (await ask(cortex, "/tokenize", model="Org/M", prompt="hi"))[0] == 200
    assert not [name for name in node.headers[-1] if name.lower().startswith("x-helexa-")]


async def test_tokenizer_info_of_the_node_is_forwarded(node: FakeNode) -> None:
    node.speak = echo
    async with running_cortex(node, settings=SETTINGS) as cortex:
        assert await ask(cortex, "/tokenizer_info", model="Org/M") == (200, {"body": None, "query": "model=Org/M"})
        assert (await ask(cortex, "/tokenizer_info"))[0] == 200
        assert (await ask(cortex, "/tokenizer_info", models="x"))[1]["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("path", [*PATHS, "/tokenizer_info"])
async def test_api_keys_and_rate_limits_apply_to_tokenizer_endpoints(node: FakeNode, path: str) -> None:
    node.speak = echo
    async with running_cortex(node, settings=SETTINGS) as cortex:
        assert (await ask(cortex, path, None, model="Org/M"))[0] == 401
        assert (await ask(cortex, path, "other", model="Org/M"))[0] == 403
        assert (await ask(cortex, path, "spent", model="Org/M"))[0] == 429
        assert (await ask(cortex, path, model="Org/Unknown"))[0] == 404
        assert [(await ask(cortex, path, "slow", model="Org/M"))[0] for _ in range(2)] == [200, 429]
        bodies = len(node.bodies)
    assert bodies == 1


async def test_tokenizer_request_with_a_broken_connection_is_502_and_node_errors_are_forwarded(node: FakeNode) -> None:
    async def refuse(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=400)

    async def die(node: FakeNode, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with running_cortex(node) as cortex:
        node.speak = refuse
        assert await ask(cortex, "/tokenize", None, model="Org/M") == (400, {"error": {"message": "no"}})
        node.speak = die
        status, content = await ask(cortex, "/tokenize", None, model="Org/M")
        assert (status, content["error"]["code"]) == (502, "upstream_connection_error")
        async with cortex.client.post(f"{cortex.url}/tokenize", data=b'{"model": 5}') as response:
            assert response.status == 400


async def test_tokenizer_request_does_not_load_a_model(node: FakeNode) -> None:
    node.models = []
    models = [{"id": "Org/M", "harness": "torch"}]
    async with running_cortex(node, models=models) as cortex:
        status, content = await ask(cortex, "/tokenize", None, model="Org/M", prompt="x")
        assert (status, content["error"]["code"]) == (503, "service_unavailable")
        assert (await ask(cortex, "/tokenize", None, prompt="x"))[1]["error"]["code"] == "missing_model_field"
    assert not node.loads
