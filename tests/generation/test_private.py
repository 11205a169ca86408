"""Private engines where memory is short."""

from types import SimpleNamespace

import pytest

from helexa.core.errors import DoesNotFitError, model_not_found
from helexa.core.source import ModelSource
from helexa.generation.private import EngineSettings, PrivateEngines
from helexa.neuron.engine_client.warm_standby import WarmStandby
from helexa.neuron.hardware.device_choice import DeviceChoice


class Crowded:
    """A registry with room for one model."""

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
    return Crowded()


@pytest.fixture
def engines(registry):
    engines = PrivateEngines(EngineSettings(device="cpu"), WarmStandby())
    engines._registries["cpu"] = registry
    return engines


async def test_a_model_that_nobody_needs_makes_room(engines, registry):
    await engines.target("org/a").open()
    await engines.target("org/b").open()
    assert (registry.unloaded, list(registry.loaded)) == (["org/a"], ["org/b"])


async def test_a_model_that_is_held_stays(engines, registry):
    holder = object()
    held = engines.target("org/a")
    await held.open(holder=holder)
    with pytest.raises(DoesNotFitError):
        await engines.target("org/b").open()
    assert list(registry.loaded) == ["org/a"]
    await held.close(holder)
    await engines.target("org/b").open()
    assert list(registry.loaded) == ["org/b"]


async def test_a_model_that_answers_stays(engines, registry):
    await engines.target("org/a").open()
    registry.loaded["org/a"].engine.open_streams = 1
    with pytest.raises(DoesNotFitError):
        await engines.target("org/b").open()


@pytest.mark.parametrize(("quant", "model_bytes"), [(None, 1600), ("bf16", 1600), ("Q4_K_M", 450), ("auto", 450)])
async def test_a_device_is_chosen_for_what_the_weights_become(engines, tmp_path, monkeypatch, quant, model_bytes):
    """A model that is quantised while it loads fits where its files would not."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1600))
    asked = []

    def device_for(size):
        asked.append(size)
        return DeviceChoice("cpu", "the processor")

    monkeypatch.setattr("helexa.generation.private.device_for", device_for)
    engines._config.harness.torch.device = "auto"
    await engines.registry_for(ModelSource("file", str(tmp_path)), quant, lambda *_: None)
    assert asked == [model_bytes]
