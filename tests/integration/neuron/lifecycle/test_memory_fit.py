"""Real engines with little memory: loads that fit, rejected loads, and the accuracy of memory estimates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from helexa.core.errors import DoesNotFitError
from helexa.core.node_reports import ModelSpec
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest, SamplingParams
from helexa.neuron.engine.loading import build
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.engine_client.memory_grants import MemoryGrants
from helexa.neuron.hardware.host_memory import own_bytes
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.weights.checkpoint import Checkpoint
from neuron.running_node import Node, running

GREEDY = SamplingParams(temperature=0)
FRUGAL = {"max_sequences": 2, "max_step_tokens": 64, "speculation": False}
"""Steps that take little: about 27 MiB; the weights take 93."""


@asynccontextmanager
async def node_with(memory_limit_mb: int) -> AsyncIterator[Node]:
    keys = FRUGAL | {"memory_limit_mb": memory_limit_mb}
    environ = {f"NEURON_HARNESS__TORCH__{key.upper()}": str(value) for key, value in keys.items()}
    async with running(environ, engine=None) as node:
        yield node


async def test_load_that_does_not_fit_is_rejected_with_sizes(smollm2_gguf: Path) -> None:
    async with node_with(memory_limit_mb=120) as node:
        status, body = await node.load(smollm2_gguf)
        assert status == 422
        error = body["error"]
        assert (error["kind"], error["model_id"], error["free_mb"]) == ("does_not_fit", "org/tiny", 120)
        assert 155 < error["required_mb"] < 175
        assert (error["weights_mb"], error["kv_mb"]) == (93, 46)
        assert f"needs {error['required_mb']} MB (weights 93 MB, kv 46 MB, activations " in error["message"]
        assert error["suggestion"].startswith("a smaller quant, a context_length below 2048")
        assert await node.get("/models") == (200, [])


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_no_weights_are_read_if_the_model_does_not_fit(
    dtype: str, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(path: Path, opened: object = build.open_checkpoint) -> Checkpoint:
        checkpoint = opened(path)  # type: ignore[operator]
        monkeypatch.setattr(checkpoint, "read", lambda *arguments: pytest.fail("a weight was read"))
        return checkpoint

    monkeypatch.setattr(build, "open_checkpoint", unread)
    with pytest.raises(DoesNotFitError):
        load_once(smollm2_gguf, EngineOptions(memory_limit_mb=50, dtype=dtype))


async def test_context_length_of_a_model_is_limited_by_the_memory_limit_of_the_node(smollm2_gguf: Path) -> None:
    """The model is trained for 8192 tokens. All of them would fit into 1 GiB."""
    async with node_with(memory_limit_mb=210) as node:
        assert await node.load(smollm2_gguf) == (200, {"status": "loaded"})
        _, (info,) = await node.get("/models")
        assert info["limit"] == {"context": 2048, "input": 1536, "output": 512}
        assert info["servable"] == {"ok": True}
        request = {"model": "org/tiny", "prompt": [5] * 2048, "max_tokens": 1}
        status, body = await node.post("/v1/completions", request)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert (body["error"]["prompt_len"], body["error"]["max"]) == (2048, 2048)
        assert "maximum context length is 2048 tokens" in body["error"]["message"]
        status, body = await node.post("/v1/completions", request | {"prompt": [5] * 100})
        assert (status, body["usage"]["prompt_tokens"]) == (200, 100)


async def test_of_two_concurrent_loads_one_is_rejected_if_only_one_fits(smollm2_gguf: Path) -> None:
    async with node_with(memory_limit_mb=280) as node:
        assert node.app is not None
        registry = node.app.state.registry
        specs = [ModelSpec(model_id=name, source=f"file:{smollm2_gguf}") for name in ("one", "two")]
        ends = await asyncio.gather(*(registry.load(spec) for spec in specs), return_exceptions=True)
        assert {type(end) for end in ends} == {ServedModel, DoesNotFitError}


async def test_memory_granted_to_a_model_covers_its_usage(smollm2_gguf: Path) -> None:
    requests: list[MemoryRequest] = []
    granted: list[MemoryGrant] = []

    class RecordedGrants(MemoryGrants):
        def grant(self, pid: int, request: MemoryRequest, least_pages: int = 0) -> MemoryGrant:
            requests.append(request)
            granted.append(super().grant(pid, request, least_pages))
            return granted[0]

    grants = RecordedGrants()
    options = EngineOptions(max_sequences=4, kv_cache_mb=32, prefix_reuse="off", speculation=False)
    client = await EngineClient.start(smollm2_gguf, options, memory=grants)
    pid = client._child.pid
    used = 0

    def look() -> None:
        nonlocal used
        used = max(used, (own_bytes(pid) or 0) - requests[0].held)

    async def answer(length: int, sampling: SamplingParams) -> None:
        prompt = [(5 + 7 * i) % 40000 for i in range(length)]
        async for _ in client.generate(prompt, max_tokens=3, sampling=sampling):
            look()

    async def answers(count: int, length: int, sampling: SamplingParams = GREEDY) -> None:
        await asyncio.gather(*(answer(length, sampling) for _ in range(count)))

    try:
        look()
        await answers(1, granted[0].pages * 64 - 4)  # fills the cache
        for count in range(1, 5):
            await answers(count, 3)
        await answers(4, 3, SamplingParams(temperature=1.0, top_p=0.999, seed=1))
        look()
        async with asyncio.timeout(60):
            while granted[0].total > 1.4 * used:  # packed weights are pages of their file until they are moved
                await asyncio.sleep(0.05)
                look()
    finally:
        await client.close()
    assert used <= granted[0].total  # usage varies by some MiB between runs
