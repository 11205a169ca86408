"""A request whose client disconnects is charged for the tokens that the node generated, streamed or not."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex
from neuron.fake_models import make_model
from neuron.running_node import Node, running
from ports import free_port

GENERATED = 774
ENDLESS: dict[str, Any] = {"model": "org/tiny", "prompt": [8, 7, 74], "max_tokens": 1000}
KEY = {"key": "capped", "account_id": "acme", "key_id": "capped", "hard_cap": 5000}
HEADERS = {"authorization": "Bearer capped"}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    port = free_port()  # chosen in advance: the node reports its address to the gateway
    async with running({"NEURON_PORT": str(port)}, port=port) as node:
        assert (await node.load(make_model(tmp_path)))[0] == 200
        yield node


@pytest.fixture
async def cortex(node: Node) -> AsyncIterator[Cortex]:
    async with running_cortex(FakeNode(url=node.url), settings={"entitlements": {"keys": [KEY]}}) as cortex:
        yield cortex


async def spent(cortex: Cortex) -> int:
    """Return what the key has spent, after all reservations are settled."""
    ledger = cortex.gateway.ledger
    await eventually(lambda: not ledger.open)
    return (await ledger.budget(cortex.gateway.authenticator.static[0].principal)).spent


def generated(node: Node) -> bool:
    """Return whether the node has received all tokens of the completion."""
    assert node.app is not None
    return node.app.state.registry.get("org/tiny").engine.prompt_tokens == 4242


async def hang_up(cortex: Cortex, node: Node, **fields: Any) -> None:
    request = asyncio.create_task(
        cortex.client.post(f"{cortex.url}/v1/completions", json=ENDLESS | fields, headers=HEADERS)
    )
    await eventually(lambda: generated(node))
    if fields.get("stream"):
        (await request).close()
    else:
        request.cancel()
        await asyncio.wait((request,))


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_hangs_up_is_charged_for_the_generated_tokens(
    cortex: Cortex, node: Node, stream: bool
) -> None:
    await hang_up(cortex, node, stream=stream)
    assert await spent(cortex) == 3 + GENERATED
    (row,) = await cortex.gateway.ledger.recent(1)
    assert (row["client_gone"], row["prompt"], row["completion"]) == (True, 3, GENERATED)


async def test_node_returns_the_usage_of_a_request_only_for_its_random_usage_id(cortex: Cortex, node: Node) -> None:
    headers = HEADERS | {"x-request-id": "mine-1", "x-helexa-usage-id": "0" * 32}
    body = {"model": "org/tiny", "prompt": [1, 3]}
    async with cortex.client.post(f"{cortex.url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200
    for guess in ("mine-1", "0" * 32):
        status, error = await node.get(f"/usage/{guess}")
        assert (status, error["error"]["code"]) == (404, "usage_not_found")
    await node.post("/v1/completions", body | {"n": 3}, **{"x-helexa-usage-id": "ab" * 16})
    assert await node.get(f"/usage/{'ab' * 16}") == (
        200,
        {"prompt_tokens": 2, "completion_tokens": 9, "cached_tokens": 0},
    )
