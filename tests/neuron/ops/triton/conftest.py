"""Triton's kernels run on the CPU here, in Triton's interpreter."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Numpy, in which the interpreter computes, warns of what a GPU takes in its stride."""
    quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(quiet)
