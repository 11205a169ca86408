"""The engine client with a process that speaks the IPC protocol without a model."""

import asyncio
import contextlib
import logging
import sys
from functools import partial
from pathlib import Path

import pytest

from helexa.core.errors import ApiError, HelexaError, ModelFileError
from helexa.core.logs import request_id
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Progress, SamplingParams, TokenOutput
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.engine_client.process_and_standby import Child
from helexa.neuron.engine_client.token_stream import TokenStream
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


async def test_token_stream_yields_every_token_and_ends_after_the_finish_reason(engine: EngineClient):
    outputs = await outputs_of(engine, 1, 50)
    assert [token for output in outputs for token in output.tokens] == list(range(50))
    assert [output.finish for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish == "length"
    assert outputs[-1].timing is not None
    assert (engine.running, engine.waiting, engine.free_pages) == (1, 0, 90)
    assert engine.open_streams == 0


async def test_token_streams_of_one_engine_run_concurrently(engine: EngineClient):
    streams = await asyncio.gather(*(outputs_of(engine, 1, count) for count in range(1, 20)))
    assert [sum(len(output.tokens) for output in outputs) for outputs in streams] == list(range(1, 20))


async def test_outputs_that_the_consumer_has_not_read_are_merged(engine: EngineClient):
    slow = stream_of(engine, 1, 500)
    first = await anext(slow)
    await outputs_of(engine, 1, 1)  # the engine sends outputs in order, so all 500 tokens of `slow` have been sent
    second = await anext(slow)
    assert first.tokens + second.tokens == list(range(500))
    assert second.finish == "length"
    with pytest.raises(StopAsyncIteration):
        await anext(slow)


async def test_log_probabilities_are_merged_with_their_tokens(engine: EngineClient):
    slow = engine.generate([1, 300], max_tokens=1000, sampling=SamplingParams(logprobs=1))
    outputs = [await anext(slow)]
    await outputs_of(engine, 1, 1)
    outputs.append(await anext(slow))
    reported = [logprob for output in outputs for logprob in output.logprobs]
    assert reported == [(-float(token), [(token, -float(token))]) for token in range(299)]


async def test_cached_tokens_are_reported_only_in_the_first_output_of_a_stream(engine: EngineClient):
    slow = stream_of(engine, 6, 20)
    first = await anext(slow)
    await outputs_of(engine, 1, 1)
    rest = [output async for output in slow]
    assert [output.cached_tokens for output in (first, *rest)] == [12] + [0] * len(rest)
    assert (engine.prompt_tokens, engine.cached_tokens) == (1000, 900)


async def test_canceled_wait_for_the_next_output_loses_no_output(engine: EngineClient):
    stream = stream_of(engine, 5)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.05)
    async with contextlib.aclosing(stream_of(engine, 3)) as other:
        await anext(other)
    assert (await anext(stream)).finish == "stop"


async def test_aclose_of_a_stream_before_its_end_cancels_the_request(engine: EngineClient):
    watch = stream_of(engine, 5)
    waiting = asyncio.create_task(anext(watch))
    async with contextlib.aclosing(stream_of(engine, 3)) as stream:
        assert (await anext(stream)).tokens == [7]
    cancelled = (await waiting).tokens
    assert len(cancelled) == 1
    assert engine.open_streams == 0
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_stream_that_is_never_awaited_sends_no_request(engine: EngineClient):
    await stream_of(engine, 3).aclose()
    assert engine.open_streams == 0
    assert (await outputs_of(engine, 1, 1))[-1].finish == "length"


async def test_overloaded_error_of_the_engine_is_counted(engine: EngineClient):
    (output,) = await outputs_of(engine, 4)
    assert output.finish == "error"
    assert output.error is not None
    assert output.error.startswith("overloaded")
    assert engine.refused == 1


async def test_engine_crash_ends_open_streams_and_rejects_new_ones(tmp_path: Path):
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


async def test_engine_that_hangs_is_killed_although_all_clients_have_disconnected(tmp_path: Path):
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


class RequestIds(logging.Handler):
    """Records the request id of each logged engine line."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.ids.append(request_id.get())


@pytest.mark.parametrize("prompt", [2, 7], ids=["crash", "hang"])
async def test_log_lines_about_the_engine_lack_the_request_id_of_the_load_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, prompt: int
):
    caplog.set_level(logging.INFO, "helexa.neuron.engine_client")
    died = asyncio.get_running_loop().create_future()
    request_id.set("load")
    client = await start(tmp_path / "model", on_exit=died.set_result, step_seconds=0.4)
    handler, logger = RequestIds(), logging.getLogger("helexa.neuron.engine_client")
    logger.addHandler(handler)
    try:
        await outputs_of(client, prompt)
        await died
    finally:
        logger.removeHandler(handler)
    assert len(handler.ids) >= 2
    assert set(handler.ids) == {""}
    await client.close()


async def test_close_of_the_client_ends_open_streams_and_does_not_call_on_exit(tmp_path: Path):
    exits: list[str] = []
    client = await start(tmp_path / "model", on_exit=exits.append)
    stream = stream_of(client, 3)
    await anext(stream)
    await asyncio.gather(client.close(), client.close())
    assert (await anext(stream)).finish == "error"
    assert exits == []
    assert not client.alive


async def test_engine_process_that_ignores_the_shutdown_message_is_killed(tmp_path: Path):
    client = await start(tmp_path / "deaf")
    await client.close(grace=0.2)
    assert not client.alive


async def test_progress_of_an_engine_load_is_passed_to_the_callback(tmp_path: Path):
    reported: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        reported.append(progress)
        (tmp_path / "slow.go").touch()

    client = await start(tmp_path / "slow", on_progress=on_progress)
    await client.close()
    assert reported == [Progress(stage="weights", done=1, total=2)]


async def test_engine_whose_load_makes_no_progress_is_killed(tmp_path: Path):
    with pytest.raises(HelexaError) as failed:
        await start(tmp_path / "slow", load_seconds=0.4)
    reason = "the engine made no progress for 0.4 s and was killed while loading the model"
    assert str(failed.value) == f"{reason}; see the node's log"


async def test_start_of_an_engine_can_be_canceled_while_it_loads_the_model(tmp_path: Path):
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
        (
            "crash",
            HelexaError,
            "the engine process ended with exit code 9 .cannot begin. while loading the model; .*log",
        ),
    ],
)
async def test_failed_load_of_the_engine_raises_a_one_line_error(
    tmp_path: Path, model: str, kind: type[Exception], message: str
):
    with pytest.raises(kind, match=f"^{message}$") as failed:
        await start(tmp_path / model)
    assert type(failed.value) is kind


async def test_invalid_frames_from_the_engine_raise_a_protocol_error(tmp_path: Path):
    babble = "import socket, sys; socket.socket(fileno=int(sys.argv[2])).sendall(b'\\xff' * 99)"
    spawn = partial(Child.spawn, (sys.executable, "-c", babble))
    with pytest.raises(HelexaError, match="invalid message"):
        await EngineClient.start(tmp_path / "model", EngineOptions(), spawn=spawn)
