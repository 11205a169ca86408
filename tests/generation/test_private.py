"""Private engines where memory is short."""

from types import SimpleNamespace

import pytest

from helexa.core.errors import DoesNotFitError, model_not_found
from helexa.generation.private import EngineSettings, PrivateEngines


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
    engines = PrivateEngines(EngineSettings(device="cpu"))
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
