"""A real engine process with real weights, used through the engine client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio
from scheduler_runs import GREEDY

from faults import bad_models
from helexa.core.errors import ModelFileError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import StepReport, TokenOutput
from helexa.neuron.engine_client.client import OVERLOADED, EngineClient
from helexa.neuron.engine_client.token_stream import TokenStream

FRANCE = [504, 3575, 282, 4649, 314]  # "The capital of France is"
PAGE = 64


@asynccontextmanager
async def running(model: Path, **options: int | bool) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(model, EngineOptions(**({"kv_cache_mb": 64} | options)))
    try:
        yield client
    finally:
        await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(smollm2_gguf: Path) -> AsyncIterator[EngineClient]:
    """An engine shared by several tests; each test leaves it idle."""
    async with running(smollm2_gguf) as client:
        yield client


def stream_of(client: EngineClient, max_tokens: int, prompt_tokens: int = len(FRANCE)) -> TokenStream:
    filler = [1000 + 7 * n for n in range(prompt_tokens - len(FRANCE))]
    return client.generate(filler + FRANCE, max_tokens=max_tokens, sampling=GREEDY)


async def outputs_of(stream: TokenStream) -> list[TokenOutput]:
    return [output async for output in stream]


def count(outputs: list[TokenOutput]) -> int:
    return sum(len(output.tokens) for output in outputs)


async def until_idle(client: EngineClient) -> None:
    """Wait until the engine reports no requests and all pages free; fail after 60 s."""
    async with asyncio.timeout(60):
        while True:
            if (client.running, client.waiting, client.free_pages) == (0, 0, client.ready.kv_pages):
                return
            await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["", "overlap"])
async def any_client(request: pytest.FixtureRequest, client: EngineClient, smollm2_gguf: Path):
    """An engine without and one with overlapping steps."""
    if not request.param:
        yield client
        return
    async with running(smollm2_gguf, overlap=True, speculation=False) as overlapping:
        yield overlapping


@pytest.mark.asyncio(loop_scope="module")
async def test_after_canceling_half_of_many_streams_all_pages_are_free(any_client: EngineClient):
    client = any_client

    async def cancel_early(stream: TokenStream) -> None:
        await anext(stream)
        await anext(stream)
        await stream.aclose()

    assert client.ready.kv_pages < 32 * 2, "the cache is too large to test preemption"
    # Up to 70 prompt tokens and 12 output tokens: some sequences cross a page boundary while they decode.
    lengths = [5 + 65 * n // 15 for n in range(16)]
    completions, _ = await asyncio.gather(
        asyncio.gather(*(outputs_of(stream_of(client, 12, length)) for length in lengths)),
        asyncio.gather(*(cancel_early(stream_of(client, 400, length)) for length in lengths)),
    )
    assert [count(outputs) for outputs in completions] == [12] * 16
    assert {outputs[-1].finish for outputs in completions} == {"length"}
    assert client.open_streams == 0
    await until_idle(client)


@pytest.mark.asyncio(loop_scope="module")
async def test_cancel_of_a_request_frees_all_its_pages_within_one_step(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
):
    reports: list[StepReport] = []
    original = EngineClient._take

    def spy(self: EngineClient, report: StepReport) -> None:
        reports.append(report)
        original(self, report)

    monkeypatch.setattr(EngineClient, "_take", spy)
    other = stream_of(client, 200)  # long enough to run beside the canceled request
    await anext(other)
    long = stream_of(client, 2000, prompt_tokens=5 * PAGE + 10)
    await anext(long)
    await long.aclose()
    await outputs_of(other)
    *steps, last = [(report.running, report.free_pages) for report in reports]
    # One report shows the canceled request's pages as free; the other request may have taken one page meanwhile.
    ((before, after),) = [(earlier, later) for earlier, later in pairwise(steps) if later[1] > earlier[1]]
    assert (before[0], after[0]) == (2, 1)
    assert after[1] - before[1] >= 5
    assert last == (0, client.ready.kv_pages)


async def test_request_to_a_full_queue_is_rejected_and_running_requests_continue(smollm2_gguf: Path):
    async with running(smollm2_gguf, max_sequences=1, max_waiting=1) as client:
        first = stream_of(client, 2000)
        await anext(first)
        second = asyncio.create_task(outputs_of(stream_of(client, 3)))
        await asyncio.sleep(0)  # the second request is sent before the third
        (rejected,) = await outputs_of(stream_of(client, 3))
        assert rejected.finish == "error"
        assert (rejected.error or "").startswith(OVERLOADED)
        await first.aclose()
        assert count(await second) == 3
        assert client.refused == 1
        await until_idle(client)


async def test_prompt_larger_than_the_kv_cache_is_rejected(smollm2_gguf: Path):
    async with running(smollm2_gguf, kv_cache_mb=4) as client:
        capacity = client.ready.kv_pages * PAGE
        (output,) = await outputs_of(stream_of(client, 1, prompt_tokens=capacity + 1))
        assert output.finish == "error"
        assert "needs more than the KV cache" in (output.error or "")
        assert count(await outputs_of(stream_of(client, 2000))) == capacity - len(FRANCE)
        await until_idle(client)


@pytest.mark.asyncio(loop_scope="module")
async def test_embeddings_run_beside_generation_and_can_be_canceled(client: EngineClient):
    expected = await client.embed(FRANCE, pooling="last")
    long = asyncio.create_task(client.embed([7] * 1500))
    outputs, again, salted = await asyncio.gather(
        outputs_of(stream_of(client, 12)), client.embed(FRANCE, pooling="last"), client.embed(FRANCE, salt="x")
    )
    long.cancel()
    assert count(outputs) == 12
    assert len(expected.vector) == 576
    assert again.vector == pytest.approx(expected.vector, abs=1e-3)
    assert salted.vector != expected.vector
    assert (expected.error, again.error, salted.error) == (None, None, None)
    too_long = await client.embed([7] * (client.ready.context_length + 1))
    assert (too_long.vector, too_long.retry) == ([], False)
    assert "needs more than the KV cache" in (too_long.error or "")
    await until_idle(client)
    assert client.open_streams == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.asyncio(loop_scope="module")
async def test_engine_process_does_not_map_the_model_file_after_the_load(client: EngineClient, smollm2_gguf: Path):
    """Truncating the file of a model that serves requests would end the engine by SIGBUS."""
    assert str(smollm2_gguf.resolve()) not in Path(f"/proc/{client.pid}/maps").read_text()


async def test_start_of_an_engine_with_a_damaged_model_file_raises_a_one_line_error(smollm2_gguf: Path, tmp_path: Path):
    with pytest.raises(ModelFileError) as raised:
        async with running(bad_models.truncated(smollm2_gguf, tmp_path / "half.gguf")):
            pass
    assert str(raised.value).startswith("half.gguf: ")
    assert "\n" not in str(raised.value)


async def test_unknown_architecture_is_named_in_the_error(tmp_path: Path):
    with pytest.raises(ModelFileError, match="unsupported architecture 'mamba'") as raised:
        async with running(bad_models.mamba_model(tmp_path / "mamba.gguf")):
            pass
    assert "\n" not in str(raised.value)
