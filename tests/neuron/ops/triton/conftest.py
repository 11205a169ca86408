"""Triton's kernels run on the CPU here, in Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest
from triton.runtime import interpreter

_patch_tensors = interpreter._patch_lang_tensor


def _with_whole_numbers(tensor: Any, scope: Any) -> None:
    """Triton 3.6 makes the bound of a loop from an array of one number, which numpy refuses from 2.4 on."""
    _patch_tensors(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_whole_numbers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Numpy, in which the interpreter computes, warns of what a GPU takes in its stride."""
    quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(quiet)
