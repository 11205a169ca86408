"""Private engines: unloading models when memory is short, and the choice of a device."""

import asyncio
from types import SimpleNamespace

import pytest

from helexa.core.errors import DoesNotFitError, model_not_found
from helexa.core.model_source_ids import ModelSource
from helexa.generation.private import EngineSettings, PrivateEngines
from helexa.neuron.engine_client.process_and_standby import WarmStandby
from helexa.neuron.hardware.device_choice import DeviceChoice


class OneModelRegistry:
    """A registry with memory for one model."""

    def __init__(self):
        self.loaded = {}
        self.unloaded = []

    def get(self, name):
        if name not in self.loaded:
            raise model_not_found(name)
        return self.loaded[name]

    def models(self):
        return list(self.loaded.values())

    async def load(self, spec, on_progress):
        if self.loaded:
            raise DoesNotFitError("it does not fit")
        self.loaded[spec.model_id] = SimpleNamespace(id=spec.model_id, engine=SimpleNamespace(open_streams=0))

    async def unload(self, name):
        del self.loaded[name]
        self.unloaded.append(name)

    async def close(self):
        pass


@pytest.fixture
def registry():
    return OneModelRegistry()


@pytest.fixture
def engines(registry):
    engines = PrivateEngines(EngineSettings(device="cpu"), WarmStandby())
    engines._registries["cpu"] = registry
    return engines


async def test_idle_private_model_is_unloaded_if_another_model_needs_its_memory(engines, registry):
    await engines.target("org/a").open()
    await engines.target("org/b").open()
    assert (registry.unloaded, list(registry.loaded)) == (["org/a"], ["org/b"])


async def test_model_held_open_by_a_caller_is_not_unloaded_for_another_model(engines, registry):
    holder = object()
    target = engines.target("org/a")
    await target.open(holder=holder)
    with pytest.raises(DoesNotFitError):
        await engines.target("org/b").open()
    assert list(registry.loaded) == ["org/a"]
    await target.close(holder)
    await engines.target("org/b").open()
    assert list(registry.loaded) == ["org/b"]


async def test_caller_whose_load_failed_does_not_keep_the_model_loaded(engines, registry):
    target, other_target = engines.target("org/a"), engines.target("org/b")
    caller, other_caller = object(), object()
    await other_target.open(holder=other_caller)
    with pytest.raises(DoesNotFitError):
        await target.open(holder=object())
    await other_target.close(other_caller)
    await target.open(holder=caller)
    await target.close(caller)
    assert registry.unloaded == ["org/b", "org/a"]


async def test_caller_canceled_while_another_caller_loads_the_model_does_not_keep_it_loaded(
    engines, registry, monkeypatch
):
    begun, released = asyncio.Event(), asyncio.Event()
    load = registry.load

    async def slow_load(spec, on_progress):
        begun.set()
        await released.wait()
        await load(spec, on_progress)

    monkeypatch.setattr(registry, "load", slow_load)
    target, caller = engines.target("org/a"), object()
    loading = asyncio.create_task(target.open(holder=caller))
    await begun.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await target.open(holder=object())
    released.set()
    await loading
    await target.close(caller)
    assert registry.unloaded == ["org/a"]


async def test_model_with_running_requests_is_not_unloaded_for_another_model(engines, registry):
    await engines.target("org/a").open()
    registry.loaded["org/a"].engine.open_streams = 1
    with pytest.raises(DoesNotFitError):
        await engines.target("org/b").open()


@pytest.mark.parametrize(("quant", "model_bytes"), [(None, 1600), ("bf16", 1600), ("Q4_K_M", 450), ("auto", 450)])
async def test_device_is_chosen_by_the_size_of_the_model_after_quantization_at_load(
    engines, tmp_path, monkeypatch, quant, model_bytes
):
    """A model that is quantized during loading needs fewer bytes than its files have."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1600))
    sizes = []

    def device_for(size):
        sizes.append(size)
        return DeviceChoice("cpu", "the processor")

    monkeypatch.setattr("helexa.generation.private.device_for", device_for)
    engines._config.harness.torch.device = "auto"
    await engines.registry_for(ModelSource("file", str(tmp_path)), quant, lambda *_: None)
    assert sizes == [model_bytes]
