"""Fixtures that several test folders share: a fake node, and a gateway in front of it."""

from collections.abc import AsyncIterator

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex


@pytest.fixture
async def node() -> AsyncIterator[FakeNode]:
    async with FakeNode().holds("Org/M").serving() as node:
        yield node


@pytest.fixture
async def cortex(node: FakeNode) -> AsyncIterator[Cortex]:
    """A gateway in front of `node`, which serves `Org/M`. `small` is an alias of `Org/M`."""
    async with running_cortex(node, aliases={"small": "Org/M", "lost": "Org/None"}) as cortex:
        yield cortex
