"""Runs Triton's kernels on the CPU, in Triton's interpreter.

The interpreter is the slowest part of the tests. Two changes make it more than twice as fast:

* Triton patches its modules again for each function that a kernel calls. Here, each launch patches them once.
* The interpreter computes each sum, difference and product of integers a second time with 64 bits, to report an
  overflow. Triton does so only in the interpreter, and the tests' tensors are small. Here, only `make nightly` does.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from nightly import NIGHTLY

interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=NIGHTLY)

_patch_modules = interpreter._patch_lang


def _patch_once(kernel: Any) -> Any:
    """Patch both modules, whichever of them the kernel itself uses: the functions that it calls may use the other."""
    return _patch_modules(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


interpreter._patch_lang = _patch_once
interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)

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
