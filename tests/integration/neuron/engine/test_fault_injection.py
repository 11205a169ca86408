"""Debug faults in a real engine process with real weights."""

import asyncio
from pathlib import Path

import pytest
from scheduler_runs import GREEDY

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import TokenOutput
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.engine_client.token_stream import TokenStream
from injection import inject

FRANCE = [504, 3575, 282, 4649, 314]  # "The capital of France is"
FAILS, NAN, HANGS, EXHAUSTED = 1001, 1002, 1003, 1004
OPTIONS = EngineOptions(kv_cache_mb=64)


def stream_of(client: EngineClient, prompt: list[int], max_tokens: int = 6) -> TokenStream:
    return client.generate(prompt, max_tokens=max_tokens, sampling=GREEDY)


async def complete(client: EngineClient, prompt: list[int], max_tokens: int = 6) -> tuple[list[int], TokenOutput]:
    outputs = [output async for output in stream_of(client, prompt, max_tokens)]
    return [token for output in outputs for token in output.tokens], outputs[-1]


async def test_injected_errors_fail_their_request_and_an_injected_hang_ends_the_engine(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    faults = f"error@token={FAILS},nan@token={NAN},oom@token={EXHAUSTED},hang@token={HANGS}"
    inject(monkeypatch, faults)
    died = asyncio.get_running_loop().create_future()
    client = await EngineClient.start(smollm2_gguf, OPTIONS, on_exit=died.set_result, step_seconds=2)
    try:
        prompts = [FRANCE + [2000 + number] * (20 * number) for number in range(4)]
        expected = [await complete(client, prompt) for prompt in prompts]

        # Bad requests fail, other requests in their batch do not, and the engine continues.
        for bad, message in ((FAILS, "ValueError"), (NAN, "not finite"), (EXHAUSTED, "OutOfMemoryError")):
            culprits = [[*FRANCE, bad], [bad] * 100]
            *healthy, first, second = await asyncio.gather(*(complete(client, prompt) for prompt in prompts + culprits))
            assert [tokens for tokens, _ in healthy] == [tokens for tokens, _ in expected]
            for tokens, output in (first, second):
                assert (tokens, output.finish, output.retry) == ([], "error", False)
                assert message in (output.error or "")
            assert (await complete(client, prompts[2]))[0] == expected[2][0]
        # Steps without finite logits fail their requests only, if the probe of the model is finite.
        for _ in range(4):
            for _, output in await asyncio.gather(*(complete(client, [bad, NAN] * 50) for bad in (7, 8, 9))):
                assert (output.finish, output.retry) == ("error", False)
        assert client.alive
        assert (client.running, client.free_pages) == (0, client.ready.kv_pages)

        # A step that hangs: its stack traces are logged, the engine is killed, and its requests may be retried.
        other = asyncio.create_task(complete(client, FRANCE, 4000))
        while not client.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        _, hung = await complete(client, [*FRANCE, HANGS])
        assert (hung.finish, hung.retry) == ("error", True)
        assert (await other)[1].retry
        assert await died == "the engine made no progress for 2 s and was killed"
        assert "debug_fault.py" in caplog.text
    finally:
        await client.close()


async def test_engine_ends_if_every_step_has_non_finite_logits(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, "nan@every=1")
    died = asyncio.get_running_loop().create_future()
    client = await EngineClient.start(smollm2_gguf, OPTIONS, on_exit=died.set_result)
    try:
        _, output = await complete(client, FRANCE)
        assert (output.finish, output.retry) == ("error", True)
        assert "only NaN or infinity" in await died
    finally:
        await client.close()
