"""Idle models fall asleep and wake at the next request, mostly with fake engine processes."""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from helexa.core.errors import ApiError, DoesNotFitError, HelexaError, ModelFileError
from helexa.core.node_reports import ModelInfo, ModelSpec
from helexa.core.wire.openai_completions import CompletionRequest
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.config import read_config
from helexa.neuron.engine_client.process_and_standby import Child
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.ops.native.kernel_library import native_kernels
from helexa.neuron.output_events import Failed, Finished, TextDelta
from helexa.neuron.requests.embedding import embedded
from helexa.neuron.requests.inference import run
from helexa.neuron.sources.hubs_and_sources import Sources
from helexa.neuron.text import TOKENIZER_PROCESS
from neuron.fake_models import ENGINE, make_model, release, starts, until
from nightly import cases

TINY = "org/tiny"


@asynccontextmanager
async def node(
    idle_secs: float = 0.02, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep, **settings: Any
) -> AsyncIterator[Registry]:
    config = read_config(None, {})
    config.harness.torch.idle_unload_secs = idle_secs
    for name, value in settings.items():
        setattr(config.recovery, name, value)
    registry = Registry(config, Sources(config), spawn=partial(Child.spawn, ENGINE), sleep=sleep)
    try:
        async with asyncio.timeout(cases(60, 600)):
            yield registry
    finally:
        await registry.close()


async def load(registry: Registry, path: Path, model_id: str = TINY, **fields: Any) -> None:
    await registry.load(ModelSpec(model_id=model_id, source=f"file:{path}", **fields))


def info(registry: Registry, model_id: str = TINY) -> ModelInfo:
    return next(info for info in registry.infos() if info.id == model_id)


async def asleep(registry: Registry, model_id: str = TINY) -> None:
    await until(lambda: info(registry, model_id).status == "sleeping")


async def ask(registry: Registry, tokens: int = 3, model_id: str = TINY) -> int:
    """Send a request as a route does, and return the number of tokens of the answer."""
    request = CompletionRequest.from_value({"model": model_id, "prompt": [1, tokens], "max_tokens": 50})
    async with aclosing(run(registry.get(model_id), [[1, tokens]], request)) as events:
        async for event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                return event.completion_tokens
    raise AssertionError("the answer has no end")


def engines() -> list[psutil.Process]:
    """Return the running engine processes of this test."""
    return processes_with(ENGINE[1])


def processes_with(argument: str) -> list[psutil.Process]:
    """Return the running child processes with this argument on their command line."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if argument in child.cmdline():
                found.append(child)
    return found


@asynccontextmanager
async def sleeping(path: Path, **recovery: Any) -> AsyncIterator[Registry]:
    """Yield a registry whose only model, `TINY`, sleeps."""
    async with node(60, **recovery) as registry:
        await load(registry, path)
        await registry.sleep(TINY)
        yield registry


@asynccontextmanager
async def waking(path: Path) -> AsyncIterator[tuple[Registry, asyncio.Task[int]]]:
    """Yield a registry whose model wakes for a request, and the task of the request.

    `path` is a model of the kind `slow`. Its wake waits for `release(path)`.
    """
    release(path)
    async with sleeping(path) as registry:
        path.with_suffix(".go").unlink()
        asking = asyncio.create_task(ask(registry))
        await until(lambda: info(registry).stage == "weights")
        yield registry, asking


async def test_engine_of_an_idle_model_ends_and_restarts_at_the_next_request(tmp_path: Path):
    async with node() as registry:
        await load(registry, make_model(tmp_path))
        model = registry.get(TINY)
        (engine,) = engines()
        await asleep(registry)
        await until(lambda: engine not in engines())
        sleeping = info(registry)
        assert (sleeping.servable and sleeping.servable.ok, sleeping.vram_used_mb, sleeping.granted_mb) == (
            True,
            None,
            None,
        )
        assert sleeping.limit is not None and sleeping.limit.context == 1024
        assert registry.get(TINY) is model and registry.models() == []
        assert await ask(registry) == 3
        await asleep(registry)
        assert await ask(registry, 5) == 5
        assert registry.events["sleeps"] >= 2 and registry.events["wakes"] == 2 and registry.events["loads"] == 1


async def test_model_sleeps_only_if_the_node_or_its_load_request_sets_an_idle_time(tmp_path: Path):
    path = make_model(tmp_path)
    async with node(0.0) as registry:
        await load(registry, path)
        await load(registry, path, "org/sleeper", idle_unload_secs=0.01)
        await asleep(registry, "org/sleeper")
        assert info(registry).status == "loaded"
    async with node(0.01) as registry:
        await load(registry, path, idle_unload_secs=0)
        await load(registry, path, "org/sleeper")
        await asleep(registry, "org/sleeper")
        assert info(registry).status == "loaded"


async def test_idle_time_after_which_a_loaded_model_sleeps_can_be_changed(tmp_path: Path):
    async with node(60) as registry:
        await load(registry, make_model(tmp_path))
        registry.keep(TINY, 0.01)
        await asleep(registry)
        registry.keep(TINY, 0)
        assert await ask(registry) == 3
        assert info(registry).status == "loaded" and registry.events["sleeps"] == 1
        registry.keep(TINY, 0.01)
        await asleep(registry)


async def test_idle_time_before_sleep_begins_at_the_end_of_a_request(tmp_path: Path):
    async with node() as registry:
        await load(registry, make_model(tmp_path))
        model = registry.get(TINY)
        await model.wake()
        async with model.admission.admit("", 2, 2):  # a request that runs longer than the idle time
            assert model.admission.idle_secs == 0
            with pytest.raises(ApiError, match="model 'org/tiny' has running requests"):
                await registry.sleep(TINY)
            await asyncio.sleep(0.05)  # the condition is that nothing happens
            assert info(registry).status == "loaded"
        assert model.admission.idle_secs < 0.02 or info(registry).status == "sleeping"
        await asleep(registry)


async def test_reading_the_reports_of_a_model_neither_wakes_the_model_nor_delays_sleep(tmp_path: Path):
    async with node() as registry:
        await load(registry, make_model(tmp_path))
        while info(registry).status == "loaded":
            _ = registry.get(TINY).info(), [model.load() for model in registry.models()]
            _ = registry.get(TINY).text.tokenizer.bos_id
            await asyncio.sleep(0)
        _ = registry.get(TINY).load(), registry.get(TINY).context_length
        assert info(registry).status == "sleeping" and registry.events["wakes"] == 0


@pytest.mark.parametrize("idle_secs", [None, 0.03], ids=["same", "changed"])
async def test_sleeping_model_tokenizes_in_a_process_that_ends_afterwards(idle_secs: float | None, tmp_path: Path):
    others = processes_with(TOKENIZER_PROCESS)  # of other tests in this process

    def started() -> int:
        return len([process for process in processes_with(TOKENIZER_PROCESS) if process not in others])

    async with node() as registry:
        await load(registry, make_model(tmp_path))
        await asleep(registry)
        if idle_secs is not None:
            registry.keep(TINY, idle_secs)
        await until(lambda: not started())
        text = registry.get(TINY).text
        tokens = await text.run(text.tokenizer.encode, "hi", add_special=False)
        assert len(tokens) == 2 and info(registry).status == "sleeping"
        assert started() == 1
        await until(lambda: not started())


async def test_one_standby_engine_process_waits_while_any_model_sleeps(tmp_path: Path):
    async with node(60) as registry:
        path = make_model(tmp_path)
        for model in ("org/one", "org/two"):
            await load(registry, path, model)
        for model in ("org/one", "org/two"):
            await registry.sleep(model)
        await until(lambda: len(engines()) == 1)
        waiting = engines()
        assert await ask(registry, model_id="org/two") == 3
        await until(lambda: len(engines()) == 2)  # another process waits for the wake of the other model
        assert waiting[0] in engines(), "the process that waited computes the answer"
        await registry.sleep("org/two")
        await until(lambda: len(engines()) == 1)
        await registry.unload("org/one")
        assert len(engines()) == 1
        await registry.unload("org/two")
        assert not engines()


async def test_each_model_that_wakes_uses_the_standby_engine_process(tmp_path: Path):
    path, models = make_model(tmp_path), ("org/one", "org/two")
    async with node(60) as registry:
        for model in models:
            await load(registry, path, model)
        for model in models:
            await registry.sleep(model)
        for running, model in enumerate(models):
            await until(lambda running=running: len(engines()) == running + 1)
            processes = engines()
            assert await ask(registry, model_id=model) == 3
            assert registry.get(model).engine.pid in [process.pid for process in processes]
        assert len(engines()) == 2, "no process waits if no model sleeps"


async def test_standby_engine_process_is_available_after_a_failed_load(tmp_path: Path):
    (tmp_path / "broken").mkdir()
    broken = make_model(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("no json")
    async with sleeping(make_model(tmp_path)) as registry:
        await until(lambda: len(engines()) == 1)
        waiting = engines()
        with pytest.raises(HelexaError):
            await load(registry, tmp_path / "missing", "org/missing")
        assert engines() == waiting
        with pytest.raises(ModelFileError):
            await load(registry, broken, "org/broken")
        await until(lambda: len(engines()) == 1)
        waiting = engines()
        assert await ask(registry) == 3
        assert engines() == waiting


async def test_idle_timer_of_a_model_is_started_once_and_ends_at_unload(tmp_path: Path):
    pauses: list[asyncio.Event] = []

    async def sleep(_seconds: float) -> None:
        pauses.append(asyncio.Event())
        pause = pauses[-1]
        try:
            await pause.wait()
        finally:
            pauses.remove(pause)

    async with node(60, sleep=sleep) as registry:
        await load(registry, make_model(tmp_path))
        await until(lambda: len(pauses) == 1)
        await registry.sleep(TINY)
        first = pauses[0]
        first.set()
        await until(lambda: len(pauses) == 1 and pauses[0] is not first)  # now it waits for the tokenizer process
        assert await ask(registry) == 3
        await registry.sleep(TINY)
        assert len(pauses) == 1
        await registry.unload(TINY)
        assert not pauses


async def test_concurrent_requests_to_a_sleeping_model_start_one_engine(tmp_path: Path):
    path = make_model(tmp_path)
    async with node() as registry:
        await load(registry, path)
        await asleep(registry)
        assert await asyncio.gather(*(ask(registry, number) for number in range(2, 12))) == list(range(2, 12))
        assert starts(path) == 2


async def test_request_waits_while_the_model_falls_asleep(tmp_path: Path):
    path = make_model(tmp_path)
    async with node(60) as registry:
        await load(registry, path)
        falling = asyncio.create_task(registry.sleep(TINY))
        await asleep(registry)
        assert not falling.done()
        assert await ask(registry) == 3
        await falling
        assert starts(path) == 2


async def test_wake_continues_after_the_client_that_caused_it_disconnects(tmp_path: Path):
    path = make_model(tmp_path, "slow")
    async with waking(path) as (registry, first):
        assert (info(registry).status, info(registry).progress) == ("sleeping", 0.5)
        first.cancel()
        await asyncio.wait([first])
        second = asyncio.create_task(ask(registry))
        release(path)
        assert await second == 3 and starts(path) == 2


async def test_request_succeeds_although_the_engine_is_killed_during_its_wake(tmp_path: Path):
    path = make_model(tmp_path, "slow")
    async with waking(path) as (_, asking):
        os.kill(engines()[0].pid, signal.SIGKILL)
        release(path)
        assert await asking == 3 and starts(path) == 3


async def test_request_whose_wake_fails_gets_503_and_the_next_request_wakes_the_model_again(tmp_path: Path):
    path = make_model(tmp_path)
    async with sleeping(path) as registry:
        path.with_suffix(".bad").touch()
        with pytest.raises(ApiError, match="slept and could not wake: the file is truncated") as caught:
            await ask(registry)
        assert (caught.value.status, info(registry).status) == (503, "sleeping")
        path.with_suffix(".bad").unlink()
        assert await ask(registry) == 3


async def test_model_whose_engine_crashes_in_each_wake_is_quarantined(tmp_path: Path):
    path = make_model(tmp_path)
    async with sleeping(path, max_restarts=1) as registry:
        path.with_suffix(".crash").touch()
        with pytest.raises(ApiError, match="slept and could not wake: the engine process ended with exit code 9"):
            await ask(registry)
        assert info(registry).status == "poisoned"
        path.with_suffix(".crash").unlink()
        await load(registry, path)
        assert await ask(registry) == 3


async def test_unload_during_a_wake_rejects_the_waiting_requests(tmp_path: Path):
    path = make_model(tmp_path, "slow")
    async with waking(path) as (registry, asking):
        await registry.unload(TINY)
        with pytest.raises(ApiError, match="is being unloaded"):
            await asking
        assert not engines() and registry.infos() == []


async def test_shutdown_during_a_wake_ends_the_engine_and_the_waiting_request(tmp_path: Path):
    path = make_model(tmp_path, "slow")
    async with waking(path) as (registry, asking):
        registry.drain()
        with pytest.raises(ApiError, match="shutting down"):
            await asking
        await registry.close()
        assert not engines()


async def test_sleeping_model_can_be_unloaded(tmp_path: Path):
    async with sleeping(make_model(tmp_path)) as registry:
        await registry.sleep(TINY)
        await registry.unload(TINY)
        with pytest.raises(ApiError, match="not found"):
            registry.get(TINY)


async def test_load_request_wakes_a_sleeping_model_with_its_former_options(tmp_path: Path):
    path = make_model(tmp_path)
    async with node(60) as registry:
        await load(registry, path)
        model = registry.get(TINY)
        await registry.sleep(TINY)
        assert await registry.load(ModelSpec(model_id=TINY)) is model
        assert info(registry).status == "loaded" and starts(path) == 2


async def test_wake_of_a_model_starts_the_process_that_tokenizes(tmp_path: Path):
    async with node(60) as registry:
        await load(registry, make_model(tmp_path))
        before = set(processes_with(TOKENIZER_PROCESS))
        await registry.sleep(TINY)
        await registry.load(ModelSpec(model_id=TINY))
        await until(lambda: bool(set(processes_with(TOKENIZER_PROCESS)) - before))


async def test_embedding_request_wakes_a_sleeping_model(tmp_path: Path):
    async with sleeping(make_model(tmp_path)) as registry:
        embedding = asyncio.create_task(embedded(registry.get(TINY), [[4]], "", list))
        await until(lambda: info(registry).status == "loaded")
        embedding.cancel()  # the fake engine computes no embeddings


async def test_model_that_needs_memory_to_wake_puts_the_longest_idle_model_to_sleep(tmp_path: Path):
    path, models = make_model(tmp_path, "hungry"), ("org/first", "org/second")
    async with node(60) as registry:
        for model_id in models:
            await load(registry, path, model_id)
            await registry.sleep(model_id)
        for model_id, other in (models, models[::-1]):
            assert await ask(registry, 3, model_id) == 3
            assert (info(registry, model_id).status, info(registry, other).status) == ("loaded", "sleeping")
        second = registry.get("org/second")
        async with second.admission.admit("", 2, 2):  # the other model waits for the end of this request
            begun = starts(path)
            asking = asyncio.create_task(ask(registry, 3, "org/first"))
            await until(lambda: starts(path) > begun)
            await asyncio.wait([asking], timeout=0.1)
            assert not asking.done() and info(registry, "org/second").status == "loaded"
        assert await asking == 3 and info(registry, "org/second").status == "sleeping"


async def test_load_request_puts_no_other_model_to_sleep(tmp_path: Path):
    path = make_model(tmp_path, "hungry")
    async with node(60) as registry:
        await load(registry, path, "org/first")
        await registry.sleep("org/first")
        await load(registry, path, "org/second")
        with pytest.raises(DoesNotFitError):
            await load(registry, path, "org/first")
        assert info(registry, "org/first").status == "sleeping" and info(registry, "org/second").status == "loaded"


async def test_pinned_model_is_not_put_to_sleep_for_a_model_that_wakes(tmp_path: Path):
    path = make_model(tmp_path, "hungry")
    async with node(60) as registry:
        await load(registry, path, "org/first")
        await registry.sleep("org/first")
        await load(registry, path, "org/pinned", idle_unload_secs=0)
        with pytest.raises(ApiError, match="could not wake: the model does not fit") as caught:
            await ask(registry, 3, "org/first")
        assert (caught.value.status, caught.value.code) == (503, "model_sleeping")
        assert info(registry, "org/pinned").status == "loaded"
        await registry.unload("org/pinned")
        assert await ask(registry, 3, "org/first") == 3


async def test_requests_are_answered_while_models_randomly_sleep_wake_or_crash(tmp_path: Path):
    """Sleep, wake, kills and requests at random moments."""
    moments = random.Random(20261128)
    path = make_model(tmp_path)
    async with node(0.003, max_restarts=10_000) as registry:
        await load(registry, path)

        async def client(number: int) -> None:
            for _ in range(cases(4, 20)):
                await asyncio.sleep(moments.choice((0, 0.003, 0.0031, 0.02, 0.2)))
                while True:
                    try:
                        assert await ask(registry, 2 + number) == 2 + number
                        break
                    except ApiError as error:  # an engine was killed right after its load, before or in the request
                        assert "ended unexpectedly" in str(error) or "engine is not running" in str(error), error

        async def killer() -> None:
            for _ in range(cases(2, 4)):
                await until(lambda: info(registry).status == "sleeping" and bool(engines()))
                for process in engines():
                    os.kill(process.pid, signal.SIGKILL)
                await asyncio.sleep(moments.uniform(0, 0.2))

        killing = asyncio.create_task(killer())
        await asyncio.gather(*(client(number) for number in range(3)))
        killing.cancel()
        assert registry.events["wakes"] > 1
        await asleep(registry)
        await until(lambda: len(engines()) == 1)  # the process that waits for the next wake


async def test_two_alternately_woken_models_reread_their_prompts_from_disk(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Real engines, and memory for one of them: the second turn of a conversation reads its pages from disk."""
    native_kernels()  # compiles the kernels, unless they are in the cache
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/kernels").symlink_to(cache_root(None) / "kernels")
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path / "cache"))
    config = read_config(None, {})
    torch = config.harness.torch
    torch.idle_unload_secs, torch.prefix_disk_mb, torch.kv_cache_mb, torch.memory_limit_mb = 60, 256, 32, 350
    torch.max_sequences = 4
    prompt = [(900 + 7 * number) % 300 for number in range(200)]
    files = {"org/first": smollm2_gguf, "org/second": Path(shutil.copy(smollm2_gguf, tmp_path))}
    registry = Registry(config, Sources(config))

    async def turn(model_id: str) -> tuple[str, int]:
        request = CompletionRequest.from_value({"model": model_id, "prompt": prompt, "max_tokens": 4, "temperature": 0})
        async with aclosing(run(registry.get(model_id), [prompt], request, principal="p")) as events:
            got = [event async for event in events]
        assert isinstance(got[-1], Finished), got[-1]
        # Joined, because a reader that is slower than the engine gets several tokens in one event.
        return "".join(event.text for event in got if isinstance(event, TextDelta)), got[-1].cached_tokens

    try:
        async with asyncio.timeout(120):
            first_turns: dict[str, str] = {}
            for model_id, file in files.items():
                await load(registry, file, model_id)
                first_turns[model_id], cached = await turn(model_id)
                assert cached == 0
                if model_id == "org/first":
                    await registry.sleep(model_id)
            for model_id in files:
                assert await turn(model_id) == (first_turns[model_id], 192)
                load_report = registry.get(model_id).load()
                assert (load_report.disk_prompt_tokens_total, load_report.prompt_tokens_total) == (192, 400)
            statuses = [info(registry, model_id).status for model_id in files]
            assert statuses == ["sleeping", "loaded"]
    finally:
        await registry.close()
