"""Charges for answers of backends that report their token counts in other ways, or not at all."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from emulator.backend import Backend
from emulator.message_quirks import USAGE
from emulator.quirk import Quirk
from emulator.table import QUIRKS

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTED = {name: quirk for name, quirk in QUIRKS.items() if quirk in USAGE}
KEYS = [{"key": name, "account_id": name, "key_id": name, "hard_cap": 10**6} for name in COUNTED]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cortex() -> AsyncIterator[Cortex]:
    async with Backend(QUIRKS).serving() as backend:
        settings = {
            "neurons": [{"name": "n1", "endpoint": backend.url, "kind": "openai"}],
            "entitlements": {"keys": KEYS},
        }
        async with running_cortex(FakeNode(url=backend.url), settings=settings, poll_interval_secs=5) as cortex:
            yield cortex


async def charge(cortex: Cortex, name: str, body: dict[str, Any]) -> float:
    """Send a request with the key `name`, and return what it was charged."""
    before = await cortex.sample("cortex_spend_tokens_total", account=name, key=name)
    headers = {"authorization": f"Bearer {name}"}
    request = {"model": name, "messages": [{"role": "user", "content": "Hi"}], **body}
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=request, headers=headers) as response:
        assert response.status == 200
        await response.read()
    return await cortex.sample("cortex_spend_tokens_total", account=name, key=name) - before


WHOLE = [name for name, quirk in COUNTED.items() if quirk.whole is not None]


def check(quirk: Quirk, charged: float) -> None:
    if quirk.seen.usage is not None:
        assert charged == sum(quirk.seen.usage)
    else:
        assert charged > 7  # more than a count that the backend reports for prompt or answer alone


def shown(name: str) -> str:
    return str(QUIRKS[name])


@pytest.mark.parametrize("name", COUNTED, ids=shown)
async def test_prompt_and_answer_of_a_stream_are_charged(cortex: Cortex, name: str) -> None:
    check(QUIRKS[name], await charge(cortex, name, {"stream": True}))


@pytest.mark.parametrize("name", WHOLE, ids=shown)
async def test_prompt_and_answer_of_a_whole_answer_are_charged(cortex: Cortex, name: str) -> None:
    check(QUIRKS[name], await charge(cortex, name, {}))
