"""An engine process with two ranks: the same results as with one, and no process left after a rank fails."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from helexa.core.errors import HelexaError, ModelFileError
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import SamplingParams, TokenOutput
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.hardware.host_memory import engine_bytes, own_bytes
from injection import inject
from tiny_models import tiny_model

FRANCE = [504, 3575, 282, 4649, 314]  # "The capital of France is"
GREEDY = SamplingParams(temperature=0)
REPETITIVE = FRANCE * 8  # drafts come from repetition
JSON_SCHEMA = '{"grammars":[{"json_schema":{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}}]}'
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": FRANCE, "sampling": GREEDY},
    "drafts": {"prompt": REPETITIVE, "sampling": GREEDY},
    "grammar": {"prompt": FRANCE, "sampling": GREEDY, "grammar": JSON_SCHEMA},
    "penalties": {
        "prompt": FRANCE,
        "sampling": SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5),
    },
    "sampled": {"prompt": FRANCE, "sampling": SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=7)},
    "log-probabilities": {"prompt": FRANCE, "sampling": SamplingParams(temperature=0, logprobs=3)},
    "prompt log-probabilities": {"prompt": REPETITIVE, "sampling": GREEDY, "prompt_logprobs": 2},
}


@asynccontextmanager
async def running(
    model: Path, ranks: int, *, devices: Sequence[str] = (), **settings: Any
) -> AsyncIterator[EngineClient]:
    options = EngineOptions(kv_cache_mb=64, tensor_parallel=ranks, threads=1, devices=list(devices))
    client = await EngineClient.start(model, options, **settings)
    try:
        yield client
    finally:
        await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(smollm2_gguf: Path) -> AsyncIterator[tuple[EngineClient, EngineClient]]:
    """An engine with one rank and an engine with two ranks."""
    async with running(smollm2_gguf, 1) as one, running(smollm2_gguf, 2) as two:
        yield one, two


async def outputs_of(client: EngineClient, name: str) -> list[TokenOutput]:
    return [output async for output in client.generate(max_tokens=24, **REQUESTS[name])]


async def result_of(client: EngineClient, name: str) -> tuple[list[Any], list[Any], list[Any]]:
    outputs = await outputs_of(client, name)
    assert outputs[-1].error is None
    fields = ("tokens", "logprobs", "prompt_logprobs")
    tokens, logprobs, prompt_logprobs = ([x for output in outputs for x in getattr(output, f)] for f in fields)
    assert tokens
    return tokens, logprobs, prompt_logprobs


def rank_processes(client: EngineClient) -> list[psutil.Process]:
    return psutil.Process(client.pid).children()


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", REQUESTS)
async def test_outputs_of_two_ranks_equal_those_of_one_rank(
    clients: tuple[EngineClient, EngineClient], name: str
) -> None:
    one, two = clients
    assert await result_of(two, name) == await result_of(one, name)


@pytest.mark.asyncio(loop_scope="module")
async def test_outputs_of_a_batch_on_two_ranks_equal_those_of_one_rank(
    clients: tuple[EngineClient, EngineClient],
) -> None:
    one, two = clients
    alone = [await result_of(one, name) for name in REQUESTS]
    assert await asyncio.gather(*(result_of(two, name) for name in REQUESTS)) == alone


@pytest.mark.asyncio(loop_scope="module")
async def test_embedding_computed_by_two_ranks_equals_that_of_one_rank(
    clients: tuple[EngineClient, EngineClient],
) -> None:
    one, two = [await client.embed(FRANCE) for client in clients]
    assert one.vector == two.vector != []


@pytest.mark.asyncio(loop_scope="module")
async def test_each_rank_holds_a_part_of_the_weights(clients: tuple[EngineClient, EngineClient]) -> None:
    one, two = clients
    [rank] = rank_processes(two)
    idle = own_bytes(os.getpid())
    assert idle is not None
    single, both = engine_bytes(one.pid), engine_bytes(two.pid)
    first, second = own_bytes(two.pid), own_bytes(rank.pid)
    assert single and both and first and second
    assert both == pytest.approx(first + second, rel=0.05)
    assert max(first, second) < single


async def test_killed_rank_ends_the_engine_and_its_streams(tiny_gguf: Path) -> None:
    died = asyncio.get_running_loop().create_future()
    async with running(tiny_gguf, 2, on_exit=died.set_result) as client:
        processes = [psutil.Process(client.pid), *rank_processes(client)]
        stream = client.generate(FRANCE, max_tokens=4000, sampling=GREEDY)
        await anext(stream)
        processes[1].send_signal(signal.SIGKILL)
        outputs = [output async for output in stream]
        assert (outputs[-1].finish, outputs[-1].retry) == ("error", True)
        assert "the process of rank 1 was ended by SIGKILL" in await died
        assert_all_end(processes)


async def test_killed_engine_ends_its_ranks(tiny_gguf: Path) -> None:
    async with running(tiny_gguf, 2) as client:
        processes = [psutil.Process(client.pid), *rank_processes(client)]
        os.kill(client.pid, signal.SIGKILL)
        assert_all_end(processes)


async def test_rank_stopped_by_sigstop_ends_the_engine(tiny_gguf: Path) -> None:
    died = asyncio.get_running_loop().create_future()
    async with running(tiny_gguf, 2, on_exit=died.set_result, step_seconds=1.5) as client:
        processes = [psutil.Process(client.pid), *rank_processes(client)]
        stream = client.generate(FRANCE, max_tokens=4000, sampling=GREEDY)
        await anext(stream)
        processes[1].send_signal(signal.SIGSTOP)
        outputs = [output async for output in stream]
        assert (outputs[-1].finish, outputs[-1].retry) == ("error", True)
        assert await died == "the engine made no progress for 1.5 s and was killed"
        assert_all_end(processes)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("rank1/exit@step=3", "the process of rank 1 ended with exit code 77"),
        ("rank1/error@step=3", "the process of rank 1 ended with exit code 1"),
        ("rank1/hang@step=3", "the engine made no progress for 1.5 s and was killed"),
        ("error@step=3", "rank 0 failed in a step of all ranks, so the engine ends: ValueError: injected: error"),
        (
            "oom@step=3",
            "rank 0 failed in a step of all ranks, so the engine ends: OutOfMemoryError: injected: out of memory",
        ),
    ],
)
async def test_error_in_a_rank_ends_the_engine(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    inject(monkeypatch, fault)
    died = asyncio.get_running_loop().create_future()
    async with running(tiny_gguf, 2, on_exit=died.set_result, step_seconds=1.5) as client:
        processes = [psutil.Process(client.pid), *rank_processes(client)]
        outputs = await outputs_of(client, "greedy")
        assert (outputs[-1].finish, outputs[-1].retry) == ("error", True)
        assert reason in await died
        assert_all_end(processes)


async def test_nan_in_a_rank_fails_the_sequence_and_clears_its_pages(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, "rank1/nan@step=3")
    async with running(tiny_gguf, 2) as client:
        outputs = await outputs_of(client, "greedy")
        assert outputs[-1].finish == "error"
        assert outputs[-1].error is not None and "finite" in outputs[-1].error
        later = await result_of(client, "greedy")
    monkeypatch.delenv("TEST_ENGINE_FAULTS")
    async with running(tiny_gguf, 1) as client:
        assert await result_of(client, "greedy") == later


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("rank1/error@load", r"^rank 1: .*injected: error'\)"),
        ("rank1/oom@load", r"^tiny\.gguf does not fit into memory \(rank 1: out of memory\); "),
        ("rank1/fault@load", r"^rank 1: injected: device error$"),
        # Either the main thread or the thread that waits for the process reports the end first.
        ("rank1/exit@load", r"the process of rank 1 ended with exit code 77"),
    ],
)
async def test_rank_that_fails_to_load_fails_the_load_of_the_model(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    inject(monkeypatch, fault)
    with pytest.raises(HelexaError, match=reason):
        async with running(tiny_gguf, 2):
            pass


async def test_rank_without_a_usable_device_fails_the_load(tiny_gguf: Path) -> None:
    with pytest.raises(HelexaError, match=r"^rank 1: device 'cuda:1' cannot be used: .*$") as failed:
        async with running(tiny_gguf, 2, devices=["cpu", "cuda:1"]):
            pass
    assert "\n" not in str(failed.value)


async def test_closing_the_engine_ends_the_processes_of_all_ranks(tiny_gguf: Path) -> None:
    async with running(tiny_gguf, 2) as client:
        processes = [psutil.Process(client.pid), *rank_processes(client)]
    assert_all_end(processes)


async def test_load_with_more_ranks_than_attention_heads_is_rejected(tmp_path: Path) -> None:
    tiny_model(
        tmp_path, model_type="llama", vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    with pytest.raises(ModelFileError, match="2 attention heads cannot be divided among 3 ranks"):
        async with running(tmp_path, 3):
            pass
