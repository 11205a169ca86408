"""Loading of the default models at start, with a local hub and fake engine processes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from helexa.core.errors import ApiError
from helexa.core.node_reports import ModelSpec
from helexa.neuron.app import create_app
from helexa.neuron.config import DefaultModel, read_config
from helexa.neuron.engine_client.process_and_standby import Child, WarmStandby
from helexa.neuron.hardware.nvidia_gpus import Accelerators
from helexa.neuron.lifecycle import load_preparation
from helexa.neuron.lifecycle.default_models import ATTEMPTS, Activation
from helexa.neuron.lifecycle.load_preparation import CudaUnavailableError
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.sources.hubs_and_sources import Sources
from neuron.fake_hub import FakeHub, Fault
from neuron.fake_models import ENGINE, make_model, release, starts, until
from neuron.running_node import running


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    hub = FakeHub()
    model = make_model(tmp_path, "at-the-hub")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    hub.repositories["org/far"] = files | {"model.safetensors": b"weights" * 200}
    hub.start()
    yield hub
    hub.stop()


@asynccontextmanager
async def registry_at(hub: FakeHub, folder: Path, device: str = "cpu") -> AsyncIterator[Registry]:
    environ = {
        "NEURON_HARNESS__TORCH__SOURCES__HUGGINGFACE__ENDPOINT": hub.url,
        "NEURON_HARNESS__TORCH__HF_CACHE": str(folder / "hub"),
    }
    config = read_config(None, environ)
    registry = Registry(config, Sources(config), device=device, spawn=partial(Child.spawn, ENGINE))
    try:
        yield registry
    finally:
        await registry.close()


@pytest.fixture
async def registry(hub: FakeHub, tmp_path: Path) -> AsyncIterator[Registry]:
    async with registry_at(hub, tmp_path) as registry:
        yield registry


FAR = ModelSpec(model_id="org/far")


def spec_of(path: Path, model_id: str) -> ModelSpec:
    return ModelSpec(model_id=model_id, source=f"file:{path}")


def failures(activation: Activation) -> dict[str, str]:
    return {failed.model_id: failed.error for failed in activation.snapshot().failed}


class Sleeps:
    """A replacement for `asyncio.sleep` that records the seconds and calls a function instead."""

    def __init__(self, meanwhile: Callable[[int], None] = lambda count: None) -> None:
        self.pauses: list[float] = []
        self._meanwhile = meanwhile

    async def __call__(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._meanwhile(len(self.pauses))


async def test_default_models_are_loaded_in_the_configured_order(registry: Registry, tmp_path: Path):
    slow = make_model(tmp_path, "slow")
    specs = [spec_of(slow, "org/slow"), spec_of(make_model(tmp_path), "org/quick")]
    activation = Activation(registry, specs)
    running = asyncio.create_task(activation.run())
    await until(lambda: activation.snapshot().stage == "weights")
    state = activation.snapshot()
    assert (state.state, state.in_progress, state.pending) == ("pre_warming", "org/slow", ["org/quick"])
    assert state.progress == 0.5
    with pytest.raises(ApiError) as refused:
        registry.get("org/quick")
    assert refused.value.status == 503
    release(slow)
    await running
    state = activation.snapshot()
    assert (state.state, state.in_progress, state.pending) == ("ready", None, [])
    assert (state.completed, state.failed) == (["org/slow", "org/quick"], [])


async def test_download_progress_of_a_default_model_is_shown_while_it_is_fetched(hub: FakeHub, registry: Registry):
    weights = 2_000_000
    hub.repositories["org/far"]["model.safetensors"] = bytes(weights)
    total = sum(len(content) for content in hub.repositories["org/far"].values())
    hub.inject("model.safetensors", Fault(stall=weights // 2))
    activation = Activation(registry, [FAR])
    running = asyncio.create_task(activation.run())
    await until(lambda: (activation.snapshot().progress or 0) >= 0.5 * weights / total - 0.2)
    state = activation.snapshot()
    assert (state.in_progress, state.stage) == ("org/far", "download")
    assert 0 < (state.progress or 0) < 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_node_without_default_models_is_ready_immediately(registry: Registry):
    assert Activation(registry, []).snapshot().state == "ready"


@pytest.mark.parametrize("models", [["good"], ["bad"], ["bad", "good"]], ids="-".join)
async def test_first_default_model_that_loads_uses_the_standby_process(tmp_path: Path, models: list[str]):
    children: list[Child] = []

    async def spawn() -> Child:
        children.append(await Child.spawn(ENGINE))
        return children[-1]

    sources = {"good": f"file:{make_model(tmp_path)}", "bad": f"file:{tmp_path / 'missing'}"}
    config = read_config(None, {})
    config.default_models = [DefaultModel(model_id=f"org/{name}", source=sources[name]) for name in models]
    standby = WarmStandby(spawn)
    await standby.begin()
    app = create_app(config, standby=standby)
    async with app.router.lifespan_context(app):
        await until(lambda: app.state.activation.snapshot().state == "ready")
        assert len(app.state.registry.models()) == models.count("good")
        await until(lambda: children[0].alive == ("good" in models))
    assert len(children) == 1
    assert not children[0].alive


async def test_next_default_model_is_loaded_if_one_fails_permanently(registry: Registry, tmp_path: Path):
    specs = [spec_of(make_model(tmp_path, "bad-file"), "org/bad"), spec_of(make_model(tmp_path), "org/good")]
    sleeps = Sleeps()
    activation = Activation(registry, specs, sleep=sleeps)
    await activation.run()
    assert activation.snapshot().completed == ["org/good"]
    assert failures(activation) == {"org/bad": "the file is truncated"}
    assert sleeps.pauses == []
    with pytest.raises(ApiError) as refused:
        registry.get("org/bad")
    assert refused.value.status == 404


async def test_failed_downloads_are_retried_with_growing_pauses(hub: FakeHub, registry: Registry, tmp_path: Path):
    hub.inject("list", *[Fault(cut=0)] * 3)
    near = make_model(tmp_path)
    states = []
    sleeps = Sleeps(lambda count: states.append(activation.snapshot()))
    activation = Activation(registry, [FAR, spec_of(near, "org/near")], sleep=sleeps)
    await activation.run()
    assert sleeps.pauses == [10, 20, 40]
    assert [(state.state, state.pending, state.completed) for state in states] == [
        ("pre_warming", ["org/far"], ["org/near"])
    ] * 3
    assert activation.snapshot().completed == ["org/near", "org/far"]
    assert starts(near) == 1


async def test_failed_download_of_a_default_model_is_given_up_after_some_retries(hub: FakeHub, registry: Registry):
    hub.stop()
    sleeps = Sleeps()
    activation = Activation(registry, [FAR], sleep=sleeps)
    await activation.run()
    assert sleeps.pauses == [10, 20, 40, 80, 160]
    assert len(sleeps.pauses) == ATTEMPTS - 1
    assert activation.snapshot().state == "ready"
    assert f"could not be fetched: {hub.url} refuses connections" in failures(activation)["org/far"]


@pytest.mark.parametrize(
    ("file", "fault", "message"),
    [
        ("list", Fault(status=401), "is private or does not exist"),
        ("list", Fault(status=403, headers=(("X-Error-Code", "GatedRepo"),)), "is gated"),
        ("list", Fault(status=404), "does not exist"),
        ("model.safetensors", Fault(body=b"WEIGHTS" * 200), "was announced; the received bytes were discarded"),
    ],
)
async def test_permanent_load_failure_is_not_retried(
    hub: FakeHub, registry: Registry, file: str, fault: Fault, message: str
):
    hub.inject(file, fault)
    sleeps = Sleeps()
    activation = Activation(registry, [FAR], sleep=sleeps)
    await activation.run()
    assert sleeps.pauses == []
    assert message in failures(activation)["org/far"]


async def test_cached_default_model_loads_while_the_hub_is_unreachable(
    hub: FakeHub, registry: Registry, tmp_path: Path
):
    await Activation(registry, [FAR]).run()
    await registry.unload("org/far")
    hub.stop()
    async with registry_at(hub, tmp_path) as another:
        sleeps = Sleeps()
        activation = Activation(another, [FAR], sleep=sleeps)
        await activation.run()
        assert (activation.snapshot().completed, sleeps.pauses) == (["org/far"], [])
        assert another.get("org/far").engine.alive


async def test_loads_fail_immediately_if_the_driver_is_broken_and_the_device_is_a_gpu(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    facts = Accelerators(unavailable="the driver was updated; reboot")
    monkeypatch.setattr(load_preparation, "accelerators", lambda: facts)
    near = make_model(tmp_path)
    async with registry_at(hub, tmp_path, device="cuda:0") as registry:
        sleeps = Sleeps()
        activation = Activation(registry, [FAR, spec_of(near, "org/near")], sleep=sleeps)
        await activation.run()
        message = "no model can run on cuda:0: the driver was updated; reboot"
        assert failures(activation) == {"org/far": message, "org/near": message}
        assert (activation.snapshot().state, sleeps.pauses, hub.requests) == ("ready", [], [])
        with pytest.raises(CudaUnavailableError, match="reboot"):
            await registry.load(FAR)
    async with registry_at(hub, tmp_path, device="cpu") as registry:
        await Activation(registry, [spec_of(near, "org/near")]).run()
        assert registry.get("org/near").engine.alive


async def test_load_with_a_broken_driver_has_its_own_error_code(monkeypatch: pytest.MonkeyPatch):
    facts = Accelerators(unavailable="the driver was updated; reboot")
    monkeypatch.setattr(load_preparation, "accelerators", lambda: facts)
    async with running({"NEURON_HARNESS__TORCH__DEVICE": "cuda"}) as node:
        for stream in (False, True):
            status, body = await node.post("/models/load", {"model_id": "org/far", "stream": stream})
            message = "no model can run on cuda: the driver was updated; reboot"
            assert (status, body) == (503, {"error": message, "code": "cuda_unavailable"})
