from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scripts_importable(monkeypatch):
    """Put the folder of the benchmark scripts on the import path."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "perf")
