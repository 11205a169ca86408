"""Freed memory is returned to the system: that of threads and that of unloaded models."""

import gc
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from helexa.core.errors import ModelFileError
from helexa.core.node_reports import ModelSpec
from helexa.neuron.config import read_config
from helexa.neuron.engine_client.process_and_standby import Child
from helexa.neuron.lifecycle.registry import Registry
from helexa.neuron.sources.hubs_and_sources import Sources
from helexa.neuron.text.model_text import ModelText
from neuron.fake_models import ENGINE, make_model

SCRIPT = """
import sys
from threading import Barrier, Lock, Thread

import psutil

from helexa.neuron.processes import heaps_and_shared_memory

if sys.argv[1] == "bound":
    heaps_and_shared_memory.bound_heaps()
if sys.argv[1] == "one, trimmed":
    heaps_and_shared_memory.use_one_heap()
bytes(20 << 20)  # after this, glibc takes blocks of this size from the heap
barrier, lock = Barrier(9), Lock()


def work():
    with lock:
        blocks = [bytes(1000) for _ in range(20_000)]
        del blocks
    barrier.wait()
    barrier.wait()


threads = [Thread(target=work) for _ in range(8)]
before = psutil.Process().memory_info().rss
for thread in threads:
    thread.start()
barrier.wait()
if "trimmed" in sys.argv[1]:
    heaps_and_shared_memory.trim_heaps()
print((psutil.Process().memory_info().rss - before) >> 20)
barrier.wait()
"""


HEAPS = [("bound", 0, 20), ("one, trimmed", 0, 20), ("unbound, trimmed", 100, 200), ("unbound", 100, 200)]


@pytest.mark.parametrize(("heaps", "least", "most"), HEAPS)
def test_memory_freed_by_threads_is_returned_to_the_operating_system(heaps: str, least: int, most: int) -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT, heaps], capture_output=True, text=True, timeout=60, check=True)
    assert least <= int(run.stdout) <= most


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    """A registry in a process whose garbage collector does not run by itself, as can happen for days."""
    config = read_config(None, {})
    registry = Registry(config, Sources(config), spawn=partial(Child.spawn, ENGINE))
    gc.collect()
    gc.disable()
    try:
        yield registry
    finally:
        gc.enable()
        await registry.close()


async def test_text_processing_objects_of_an_unloaded_model_are_freed(registry: Registry, tmp_path: Path) -> None:
    model = await registry.load(ModelSpec(model_id="org/tiny", source=f"file:{make_model(tmp_path)}"))
    text = weakref.ref(model.text)
    del model
    await registry.unload("org/tiny")
    assert text() is None


async def test_failed_loads_do_not_accumulate_memory(registry: Registry, tmp_path: Path) -> None:
    spec = ModelSpec(model_id="org/tiny", source=f"file:{make_model(tmp_path, 'bad-file')}")
    before = sum(type(one) is ModelText for one in gc.get_objects())  # other tests may hold some
    for _ in range(3):
        with suppress(ModelFileError):
            await registry.load(spec)
    assert sum(type(one) is ModelText for one in gc.get_objects()) <= before + 1
