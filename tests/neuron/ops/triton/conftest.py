"""Triton's kernels run on the CPU here, in Triton's interpreter."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

_patch_tensors = interpreter._patch_lang_tensor


def _with_whole_numbers(tensor: Any, scope: Any) -> None:
    """Triton 3.6 makes the bound of a loop from an array of one number, which numpy refuses from 2.4 on."""
    _patch_tensors(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_whole_numbers

_create_dot = interpreter.InterpreterBuilder.create_dot


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Some processors' BLAS sums a row in another order when other rows are beside it, which no tensor core does: in
    float64 that is lost when it is rounded."""
    if d.data.dtype == np.float32 and a.dtype.is_floating() and a.dtype.primitive_bitwidth > 8:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
    return _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)


interpreter.InterpreterBuilder.create_dot = _dot


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Numpy, in which the interpreter computes, warns of what a GPU takes in its stride."""
    quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(quiet)
