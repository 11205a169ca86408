"""Random requests, disconnects, failed loads and lost nodes never overfill a device or leak state."""

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from time import monotonic

import pytest

from cortex.fake_node import FakeNode
from cortex.lifecycle.running_lifecycle import SIZES, Stage, stage
from cortex.running_gateway import eventually
from helexa.core.errors import ApiError
from helexa.cortex.lifecycle.load_queue import WaitingRequest

ROUNDS = 150
RESIDENCY_SECS = 0.1
TOTALS_MB = {"a": 7500, "b": 9500}


def holds(node: FakeNode, model: str) -> bool:
    return any(entry["id"] == model for entry in node.models)


async def client(s: Stage, rng: random.Random, nodes: list[FakeNode]) -> str:
    """Wait for a random model, use it briefly, and return the outcome. Some clients give up first."""
    model = rng.choice(list(SIZES))
    try:
        async with asyncio.timeout(rng.choice((0.05, 0.5, 60))):
            target = await s.lifecycle.serve(model, WaitingRequest())
    except TimeoutError:
        return "gone"
    except ApiError as error:
        assert error.status == 503, error
        return "refused"
    server = next(node for node in nodes if node.name == target.node)
    if (target.node, model) in s.fleet.view().draining or not holds(server, model):
        return "late"
    with s.fleet.request(target.node, model):
        for _ in range(rng.randrange(5)):
            assert holds(server, model), f"{model} left {target.node} while in use"
            await asyncio.sleep(0.01)
    return "served"


async def pulse(pauses: list[float]) -> None:
    """Append the actual duration of each 5 ms sleep of the event loop to `pauses`."""
    while True:
        begun = monotonic()
        await asyncio.sleep(0.005)
        pauses.append(monotonic() - begun)


@pytest.mark.parametrize("seed", range(3))
async def test_after_random_events_memory_estimates_and_model_states_are_consistent(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helexa.cortex.lifecycle.evictor.LEAST_RESIDENCY_SECS", RESIDENCY_SECS)
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(FakeNode(name).with_accelerator(total, SIZES).serving())
            for name, total in TOTALS_MB.items()
        ]
        s = await stack.enter_async_context(stage(*nodes, gateway={"load_timeout_secs": 1}))
        pauses: list[float] = []
        watch = asyncio.create_task(pulse(pauses))
        clients: list[asyncio.Task[str]] = []
        for _ in range(ROUNDS):
            clients.append(asyncio.create_task(client(s, rng, nodes)))
            node = rng.choice(nodes)
            node.down = rng.random() < 0.1
            node.load_error = (500, {"error": "out of memory"}) if rng.random() < 0.1 else None
            (node.may_load.clear if rng.random() < 0.1 else node.may_load.set)()
            assert all(node.free_mb() >= 0 for node in nodes)
            await asyncio.sleep(rng.uniform(0, 0.04))
        for node in nodes:
            node.down, node.load_error = False, None
            node.may_load.set()
        outcomes = await asyncio.gather(*clients)
        watch.cancel()
        assert "served" in outcomes and s.evicted
        # A model may be evicted before its waiting requests use it only if the event loop was blocked meanwhile.
        assert "late" not in outcomes or max(pauses) > RESIDENCY_SECS / 4
        await eventually(lambda: not s.fleet.view().loading and not s.fleet.view().draining)
        assert all(node.free_mb() >= 0 for node in nodes)
        assert not s.fleet.view().in_flight
        assert all(s.lifecycle.progress(model) is None for model in SIZES)
        with suppress(ApiError):
            await s.ask("A")  # the lifecycle still works
    loads = [task for task in asyncio.all_tasks() if task.get_name().startswith(("load ", "unload "))]
    assert loads == []
