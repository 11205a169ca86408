"""A runner with real weights, shared by the engine's tests."""

from pathlib import Path

import pytest

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once


@pytest.fixture(scope="session")
def runner(smollm2_gguf: Path) -> Runner:
    """A runner of SmolLM2 in float32 on the reference kernels."""
    return load_once(smollm2_gguf, EngineOptions(dtype="float32", kv_cache_mb=256))
