"""A real engine process on real weights, behind the client that the server uses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio
from driving import GREEDY

from faults import bad_models
from helexa.core.errors import ModelFileError
from helexa.neuron.engine.ipc.messages import EngineOptions, StepReport, TokenOutput
from helexa.neuron.engine_client.client import OVERLOADED, EngineClient, TokenStream

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
    """An engine that several tests use; each leaves it idle."""
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
    """Wait for the report that nothing runs; bounded, so that a leak fails the test rather than hanging it."""
    async with asyncio.timeout(60):
        while True:
            if (client.running, client.waiting, client.free_pages) == (0, 0, client.ready.kv_pages):
                return
            await asyncio.sleep(0.01)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[False, True], ids=["", "overlap"])
async def any_client(request: pytest.FixtureRequest, client: EngineClient, smollm2_gguf: Path):
    """An engine that reads each step before the next one, and one that does not."""
    if not request.param:
        yield client
        return
    async with running(smollm2_gguf, overlap=True, speculation=False) as overlapping:
        yield overlapping


@pytest.mark.asyncio(loop_scope="module")
async def test_half_of_many_streams_hang_up_and_nothing_is_lost_or_left(any_client: EngineClient):
    client = any_client

    async def hang_up(stream: TokenStream) -> None:
        await anext(stream)
        await anext(stream)
        await stream.aclose()

    assert client.ready.kv_pages < 32 * 2, "the cache must be too small for all, so that some are preempted"
    # Up to 70 tokens of prompt and 12 of answer: some cross a page's border while they decode.
    lengths = [5 + 65 * n // 15 for n in range(16)]
    answers, _ = await asyncio.gather(
        asyncio.gather(*(outputs_of(stream_of(client, 12, length)) for length in lengths)),
        asyncio.gather(*(hang_up(stream_of(client, 400, length)) for length in lengths)),
    )
    assert [count(answer) for answer in answers] == [12] * 16
    assert {answer[-1].finish for answer in answers} == {"length"}
    assert client.open_streams == 0
    await until_idle(client)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_cancel_frees_its_pages_in_the_step_that_drops_it(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
):
    reports: list[StepReport] = []
    take = EngineClient._take

    def spy(self: EngineClient, report: StepReport) -> None:
        reports.append(report)
        take(self, report)

    monkeypatch.setattr(EngineClient, "_take", spy)
    other = stream_of(client, 200)  # long enough to see it
    await anext(other)
    long = stream_of(client, 2000, prompt_tokens=5 * PAGE + 10)
    await anext(long)
    await long.aclose()
    await outputs_of(other)
    *steps, last = [(report.running, report.free_pages) for report in reports]
    # The closed one is there with all its pages, or gone with all of them; the other may have taken one meanwhile.
    ((before, after),) = [(step, later) for step, later in pairwise(steps) if later[1] > step[1]]
    assert (before[0], after[0]) == (2, 1)
    assert after[1] - before[1] >= 5
    assert last == (0, client.ready.kv_pages)


async def test_a_full_queue_refuses_and_goes_on(smollm2_gguf: Path):
    async with running(smollm2_gguf, max_sequences=1, max_waiting=1) as client:
        first = stream_of(client, 2000)
        await anext(first)
        second = asyncio.create_task(outputs_of(stream_of(client, 3)))
        await asyncio.sleep(0)  # it is on its way to the engine, before the next
        (refusal,) = await outputs_of(stream_of(client, 3))
        assert refusal.finish == "error"
        assert (refusal.error or "").startswith(OVERLOADED)
        await first.aclose()
        assert count(await second) == 3
        assert client.refused == 1
        await until_idle(client)


async def test_a_prompt_that_the_cache_cannot_hold_is_refused(smollm2_gguf: Path):
    async with running(smollm2_gguf, kv_cache_mb=4) as client:
        capacity = client.ready.kv_pages * PAGE
        (output,) = await outputs_of(stream_of(client, 1, prompt_tokens=capacity + 1))
        assert output.finish == "error"
        assert "KV pages" in (output.error or "")
        assert count(await outputs_of(stream_of(client, 2000))) == capacity - len(FRANCE)
        await until_idle(client)


@pytest.mark.asyncio(loop_scope="module")
async def test_vectors_come_beside_answers_and_a_cancelled_one_leaves_nothing(client: EngineClient):
    alone = await client.embed(FRANCE, pooling="last")
    long = asyncio.create_task(client.embed([7] * 1500))
    answer, again, other = await asyncio.gather(
        outputs_of(stream_of(client, 12)), client.embed(FRANCE, pooling="last"), client.embed(FRANCE, salt="x")
    )
    long.cancel()
    assert count(answer) == 12
    assert len(alone.vector) == 576
    assert again.vector == pytest.approx(alone.vector, abs=1e-3)
    assert other.vector != alone.vector
    assert (alone.error, again.error, other.error) == (None, None, None)
    too_long = await client.embed([7] * (client.ready.context_length + 1))
    assert (too_long.vector, too_long.retry) == ([], False)
    assert "KV pages" in (too_long.error or "")
    await until_idle(client)
    assert client.open_streams == 0


async def test_a_damaged_file_is_refused_in_one_line(smollm2_gguf: Path, tmp_path: Path):
    with pytest.raises(ModelFileError) as refused:
        async with running(bad_models.truncated(smollm2_gguf, tmp_path / "half.gguf")):
            pass
    assert str(refused.value).startswith("half.gguf: ")
    assert "\n" not in str(refused.value)


async def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ModelFileError, match="unsupported architecture 'mamba'") as refused:
        async with running(bad_models.mamba_model(tmp_path / "mamba.gguf")):
            pass
    assert "\n" not in str(refused.value)
