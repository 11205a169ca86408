"""The engine client against a real process that speaks the protocol."""

import asyncio
import contextlib
import logging
import sys
from functools import partial
from pathlib import Path

import pytest

from helexa.core.errors import ApiError, HelexaError, ModelFileError
from helexa.core.logs import request_id
from helexa.neuron.engine.ipc.messages import EngineOptions, Progress, SamplingParams, TokenOutput
from helexa.neuron.engine_client.child import Child
from helexa.neuron.engine_client.client import EngineClient, TokenStream
from neuron.fake_models import ENGINE, until


async def start(model: Path, **arguments) -> EngineClient:
    return await EngineClient.start(model, EngineOptions(), spawn=partial(Child.spawn, ENGINE), **arguments)


@pytest.fixture
async def engine(tmp_path: Path):
    client = await start(tmp_path / "model")
    yield client
    await client.close()


def stream_of(client: EngineClient, *prompt: int) -> TokenStream:
    return client.generate(list(prompt), max_tokens=1000, sampling=SamplingParams())


async def outputs_of(client: EngineClient, *prompt: int) -> list[TokenOutput]:
    return [output async for output in stream_of(client, *prompt)]


async def test_a_stream_brings_every_token_and_ends_after_finish(engine: EngineClient):
    outputs = await outputs_of(engine, 1, 50)
    assert [token for output in outputs for token in output.tokens] == list(range(50))
    assert [output.finish for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish == "length"
    assert outputs[-1].timing is not None
    assert (engine.running, engine.waiting, engine.free_pages) == (1, 0, 90)
    assert engine.open_streams == 0


async def test_streams_run_side_by_side(engine: EngineClient):
    answers = await asyncio.gather(*(outputs_of(engine, 1, count) for count in range(1, 20)))
    assert [sum(len(output.tokens) for output in answer) for answer in answers] == list(range(1, 20))


async def test_what_a_slow_consumer_misses_is_merged(engine: EngineClient):
    slow = stream_of(engine, 1, 500)
    first = await anext(slow)
    await outputs_of(engine, 1, 1)  # the engine answers in order: by now it has sent all 500
    rest = await anext(slow)
    assert first.tokens + rest.tokens == list(range(500))
    assert rest.finish == "length"
    with pytest.raises(StopAsyncIteration):
        await anext(slow)


async def test_log_probabilities_are_merged_with_their_tokens(engine: EngineClient):
    slow = engine.generate([1, 300], max_tokens=1000, sampling=SamplingParams(logprobs=1))
    outputs = [await anext(slow)]
    await outputs_of(engine, 1, 1)
    outputs.append(await anext(slow))
    told = [logprob for output in outputs for logprob in output.logprobs]
    assert told == [(-float(token), [(token, -float(token))]) for token in range(299)]


async def test_cached_tokens_come_once_however_outputs_are_merged(engine: EngineClient):
    slow = stream_of(engine, 6, 20)
    first = await anext(slow)
    await outputs_of(engine, 1, 1)
    rest = [output async for output in slow]
    assert [output.cached_tokens for output in (first, *rest)] == [12] + [0] * len(rest)
    assert (engine.prompt_tokens, engine.cached_tokens) == (1000, 900)


async def test_a_cancelled_wait_loses_nothing(engine: EngineClient):
    stream = stream_of(engine, 5)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.05)
    async with contextlib.aclosing(stream_of(engine, 3)) as other:
        await anext(other)
    assert (await anext(stream)).finish == "stop"


async def test_closing_early_cancels_at_once(engine: EngineClient):
    watch = stream_of(engine, 5)
    waiting = asyncio.create_task(anext(watch))
    async with contextlib.aclosing(stream_of(engine, 3)) as stream:
        assert (await anext(stream)).tokens == [7]
    cancelled = (await waiting).tokens
    assert len(cancelled) == 1
    assert engine.open_streams == 0
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_stream_that_was_never_awaited_costs_nothing(engine: EngineClient):
    await stream_of(engine, 3).aclose()
    assert engine.open_streams == 0
    assert (await outputs_of(engine, 1, 1))[-1].finish == "length"


async def test_a_refusal_is_counted(engine: EngineClient):
    (output,) = await outputs_of(engine, 4)
    assert output.finish == "error"
    assert output.error is not None
    assert output.error.startswith("overloaded")
    assert engine.refused == 1


async def test_death_ends_every_stream_and_refuses_the_next(tmp_path: Path):
    died = asyncio.get_running_loop().create_future()
    client = await start(tmp_path / "model", on_exit=died.set_result)
    idle = stream_of(client, 3)
    await anext(idle)
    outputs = await outputs_of(client, 2)
    assert outputs[0].tokens == [7]
    assert outputs[-1].finish == "error"
    assert outputs[-1].error
    assert (await anext(idle)).finish == "error"
    assert "exit code 3" in (reason := await died)
    assert "the device caught fire" in reason
    assert not client.alive
    with pytest.raises(ApiError) as refused:
        stream_of(client, 1, 1)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (503, "service_unavailable", 2)
    await client.close()


async def test_an_engine_that_hangs_is_killed_although_everybody_has_hung_up(tmp_path: Path):
    died = asyncio.get_running_loop().create_future()
    client = await start(tmp_path / "model", on_exit=died.set_result, step_seconds=0.4)
    stream = stream_of(client, 7)
    waiting = asyncio.create_task(anext(stream))
    await until(lambda: client.open_streams == 1)
    await stream.aclose()
    await asyncio.wait([waiting])
    async with asyncio.timeout(60):
        assert "made no progress for 0.4 s" in await died
    await client.close()


class Numbers(logging.Handler):
    """The requests that logged lines belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(request_id.get())


@pytest.mark.parametrize("prompt", [2, 7], ids=["it dies", "it hangs"])
async def test_later_lines_of_an_engine_are_not_of_the_request_that_loaded_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prompt: int
):
    caplog.set_level(logging.INFO, "helexa.neuron.engine_client")
    died = asyncio.get_running_loop().create_future()
    request_id.set("load")
    client = await start(tmp_path / "model", on_exit=died.set_result, step_seconds=0.4)
    numbers, logger = Numbers(), logging.getLogger("helexa.neuron.engine_client")
    logger.addHandler(numbers)
    try:
        await outputs_of(client, prompt)
        await died
    finally:
        logger.removeHandler(numbers)
    assert len(numbers.seen) >= 2
    assert set(numbers.seen) == {""}
    await client.close()


async def test_close_ends_open_streams_and_calls_nobody(tmp_path: Path):
    exits: list[str] = []
    client = await start(tmp_path / "model", on_exit=exits.append)
    stream = stream_of(client, 3)
    await anext(stream)
    await asyncio.gather(client.close(), client.close())
    assert (await anext(stream)).finish == "error"
    assert exits == []
    assert not client.alive


async def test_a_process_that_does_not_end_is_killed(tmp_path: Path):
    client = await start(tmp_path / "deaf")
    await client.close(grace=0.2)
    assert not client.alive


async def test_progress_is_reported_while_loading(tmp_path: Path):
    seen: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        seen.append(progress)
        (tmp_path / "slow.go").touch()

    client = await start(tmp_path / "slow", on_progress=on_progress)
    await client.close()
    assert seen == [Progress(stage="weights", done=1, total=2)]


async def test_a_load_without_progress_is_ended(tmp_path: Path):
    with pytest.raises(HelexaError) as failed:
        await start(tmp_path / "slow", load_seconds=0.4)
    assert str(failed.value) == "the engine made no progress for 0.4 s and was killed while loading the model"


async def test_loading_can_be_abandoned(tmp_path: Path):
    reported = asyncio.Event()
    loading = asyncio.create_task(start(tmp_path / "slow", on_progress=lambda progress: reported.set()))
    await reported.wait()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        ("bad-file", ModelFileError, "the file is truncated"),
        ("no-memory", HelexaError, "not enough memory"),
        ("crash", HelexaError, "the engine process ended with exit code 9 .cannot begin. while loading the model"),
    ],
)
async def test_a_failed_load_says_why_in_one_line(tmp_path: Path, model: str, kind: type[Exception], message: str):
    with pytest.raises(kind, match=f"^{message}$") as failed:
        await start(tmp_path / model)
    assert type(failed.value) is kind


async def test_a_process_that_speaks_nonsense_is_not_believed(tmp_path: Path):
    babble = "import socket, sys; socket.socket(fileno=int(sys.argv[2])).sendall(b'\\xff' * 99)"
    spawn = partial(Child.spawn, (sys.executable, "-c", babble))
    with pytest.raises(HelexaError, match="protocol"):
        await EngineClient.start(tmp_path / "model", EngineOptions(), spawn=spawn)
