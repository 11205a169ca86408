"""An engine whose model two hosts compute: the same results as on one host, and no process left after a failure."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from helexa.neuron.engine_client.client import EngineClient
from neuron.pipeline.conftest import GroupOf, running
from neuron.ranks.test_engine import FRANCE, REQUESTS, result_of


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(smollm2_gguf: Path, group_of: GroupOf) -> AsyncIterator[tuple[EngineClient, EngineClient]]:
    """An engine on one host and an engine on two hosts."""
    async with running(smollm2_gguf, None) as one, running(smollm2_gguf, group_of(2)) as two:
        yield one, two


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", REQUESTS)
async def test_outputs_of_two_hosts_equal_those_of_one_host(
    clients: tuple[EngineClient, EngineClient], name: str
) -> None:
    one, two = clients
    assert await result_of(two, name) == await result_of(one, name)


@pytest.mark.asyncio(loop_scope="module")
async def test_outputs_of_a_batch_on_two_hosts_equal_those_of_one_host(
    clients: tuple[EngineClient, EngineClient],
) -> None:
    one, two = clients
    alone = [await result_of(one, name) for name in REQUESTS]
    assert await asyncio.gather(*(result_of(two, name) for name in REQUESTS)) == alone


@pytest.mark.asyncio(loop_scope="module")
async def test_embedding_computed_by_two_hosts_equals_that_of_one_host(
    clients: tuple[EngineClient, EngineClient],
) -> None:
    one, two = [await client.embed(FRANCE) for client in clients]
    assert one.vector == two.vector != []
