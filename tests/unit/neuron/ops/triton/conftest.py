"""Runs Triton's kernels on the CPU, in Triton's interpreter."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter

import triton_interpreter  # noqa: F401 - makes it faster

_patch_tensors = interpreter._patch_lang_tensor


def _with_whole_numbers(tensor: Any, scope: Any) -> None:
    """Convert loop bounds to integers. Triton 3.6 uses an array of one number, which numpy 2.4 and later rejects."""
    _patch_tensors(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_whole_numbers

_create_dot = interpreter.InterpreterBuilder.create_dot


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Multiply in float64, so that a row does not depend on the other rows. The order of
    summation in some BLAS libraries depends on the number of rows.
    """
    if d.data.dtype == np.float32 and a.dtype.is_floating() and a.dtype.primitive_bitwidth > 8:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
    return _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)


interpreter.InterpreterBuilder.create_dot = _dot


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore numpy's warnings about overflow and NaN, which GPUs do not raise."""
    quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(quiet)
