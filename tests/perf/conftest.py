from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scripts_importable(monkeypatch):
    """The benchmarks are scripts that import one another; their folder is no package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "perf")
