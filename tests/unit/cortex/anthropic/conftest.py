"""Fixture: Anthropic's Python client, connected to a gateway."""

from collections.abc import AsyncIterator

import anthropic
import pytest

from cortex.anthropic.conversation_node import talking
from cortex.running_gateway import Cortex


@pytest.fixture
async def client(cortex: Cortex) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with talking(cortex) as client:
        yield client
