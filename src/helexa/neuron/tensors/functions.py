"""The numpy backend: functions of torch that the engine uses, for numpy arrays.

Torch's documentation describes the functions that have no docstring here.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import ml_dtypes
import numpy

from helexa.core.errors import not_installed
from helexa.neuron.hardware.cpus import physical_cores
from helexa.neuron.tensors.array import CPU, Array, CpuDevice, MetaArray, sizes_of

np: Any = numpy  # its functions return arrays of the class of their arguments

float64, float32, float16 = np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn, float8_e5m2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
float8_e8m0fnu = np.dtype(ml_dtypes.float8_e8m0fnu)
int64, int32, int16, int8, uint8 = (np.dtype(kind) for kind in (np.int64, np.int32, np.int16, np.int8, np.uint8))
globals()["bool"] = np.dtype(np.bool_)  # named as in torch
nan, inf = np.nan, np.inf
contiguous_format = None
inference_mode = nullcontext
finfo = ml_dtypes.finfo
_threads: list[int] = []


class OutOfMemoryError(MemoryError):
    """No memory is left; in this backend, only fault injection raises this error."""


class AcceleratorError(RuntimeError):
    """A GPU failed; in this backend, only fault injection raises this error."""


def prepare() -> None:
    """Make numpy compute infinity and NaN without a warning, as torch does."""
    np.seterr(all="ignore")


def device(name: str) -> CpuDevice:
    """Return the device `name`.

    Raises:
        RuntimeError: the device is not a CPU.
    """
    # numpy has no GPU arrays.
    if name.partition(":")[0] != "cpu":
        raise RuntimeError(not_installed("torch", "gpu"))
    return CPU


def set_num_threads(count: int) -> None:
    """Set the number of threads of the numpy backend's kernels."""
    _threads[:] = [count]


def get_num_threads() -> int:
    """Return the number of kernel threads, by default one per physical core."""
    return _threads[0] if _threads else physical_cores()


# New arrays


def empty(*shape: Any, dtype: Any = float32, device: Any = None) -> Array:
    """Return an uninitialized array, or one without numbers on the device `meta`."""
    sizes = sizes_of(shape)
    if device == "meta":
        # The array has a shape and a dtype, but takes the memory of one number.
        return np.broadcast_to(np.zeros((), dtype).view(MetaArray), sizes, subok=True)
    return np.empty(sizes, dtype).view(Array)


def zeros(*shape: Any, dtype: Any = float32, device: Any = None) -> Array:
    return np.zeros(sizes_of(shape), dtype).view(Array)


def ones(*shape: Any, dtype: Any = float32, device: Any = None) -> Array:
    return np.ones(sizes_of(shape), dtype).view(Array)


def full(shape: Sequence[int], value: Any, dtype: Any = float32) -> Array:
    return np.full(tuple(shape), value, dtype).view(Array)


def zeros_like(like: Array, dtype: Any = None) -> Array:
    return np.zeros(like.shape, dtype or like.dtype).view(Array)


def ones_like(like: Array, dtype: Any = None) -> Array:
    return np.ones(like.shape, dtype or like.dtype).view(Array)


def empty_like(like: Array) -> Array:
    return np.empty(like.shape, like.dtype).view(Array)


def tensor(values: Any, dtype: Any = None, device: Any = None) -> Array:
    """Return an array of numbers, by default int64 for integers, else float32."""
    array = np.array(values, dtype)
    if dtype is None and array.dtype == np.float64:
        array = array.astype(np.float32)
    return array.view(Array)


def arange(*limits: Any, dtype: Any = None, device: Any = None) -> Array:
    """Return ascending numbers, by default int64 for integers, else float32."""
    if all(isinstance(limit, int | np.integer) for limit in limits):
        return np.arange(*limits).astype(dtype or int64).view(Array)
    return _fractions(*limits).astype(dtype or float32).view(Array)


def _fractions(start: float, stop: float, step: float) -> Any:
    """Return `start`, `start + step`, .. below `stop`, rounded as torch rounds them."""
    exact = start + step * np.arange(math.ceil((stop - start) / step))
    # torch computes blocks of 16 numbers as two vectors of 8 numbers. It rounds the first number of a vector to
    # float32, adds multiples of `step` to the rounded number, and rounds the sums. Numbers after the last block are
    # rounded once.
    vectors = exact[: len(exact) // 16 * 16].reshape(-1, 8)
    vectors[:] = vectors[:, :1].astype(np.float32).astype(np.float64) + step * np.arange(8)
    return exact.astype(np.float32)


def from_numpy(array: Any) -> Array:
    return array.view(Array)


def frombuffer(buffer: Any, dtype: Any) -> Array:
    return np.frombuffer(buffer, dtype).view(Array)


# Functions of arrays


def cat(arrays: Sequence[Array], dim: int = 0) -> Array:
    return np.concatenate([np.asarray(array) for array in arrays], dim).view(Array)


def stack(arrays: Sequence[Array], dim: int = 0) -> Array:
    return np.stack([np.asarray(array) for array in arrays], dim).view(Array)


def where(condition: Array, chosen: Any, other: Any, out: Array | None = None) -> Array:
    dtype = next(value.dtype for value in (chosen, other) if isinstance(value, np.ndarray))
    both = [value if isinstance(value, np.ndarray) else dtype.type(value) for value in (chosen, other)]
    result: Array = np.where(condition, *both).view(Array)
    return result if out is None else out.copy_(result)


def equal(first: Array, second: Array) -> bool:
    return np.array_equal(first, second)


def allclose(first: Array, second: Array, rtol: float, atol: float) -> bool:
    return np.allclose(first, second, rtol, atol)


def ldexp(values: Array, exponents: Array) -> Array:
    return np.ldexp(values, exponents)


def bucketize(values: Array, boundaries: Array, right: bool) -> Array:
    return np.searchsorted(boundaries, values, "right" if right else "left").view(Array)


def pad(array: Array, counts: Sequence[int]) -> Array:
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(counts[0], counts[1])]).view(Array)


# Memory


class _Lease(np.ndarray):
    """The array that owns the memory of an array from `lent`.

    All views of the memory keep this object alive.
    """

    returned: Callable[[], object] | None = None  # function that gives the memory back
    address = 0

    def __del__(self) -> None:  # a step lends hundreds of arrays, and `weakref.finalize` takes ten times as long
        if self.returned is not None:
            self.returned()


def lent(block: memoryview, dtype: Any, give_back: Callable[[memoryview], object]) -> Array:
    """Return a numpy array in `block`; freeing its last view calls `give_back(block)`."""
    lease = np.frombuffer(block, np.uint8).view(_Lease)
    lease.returned, lease.address = partial(give_back, block), lease.ctypes.data
    # numpy shortens a chain of views only past views of the same class, so all views keep the `_Lease` as a base.
    return lease.view(Array).view(dtype)


def may_be_lent(array: Array) -> bool:
    """Return whether numpy's `array` is a view of lent memory."""
    return isinstance(_root(array), _Lease)


def storage_address(array: Array) -> int:
    """Return the address of the memory of which numpy's `array` is a view."""
    root = _root(array)
    # A `_Lease` stores its address, because `ctypes.data` is slow.
    return root.address if isinstance(root, _Lease) else root.ctypes.data


def _root(array: Array) -> Any:
    root = array
    while not isinstance(root, _Lease) and isinstance(root.base, np.ndarray):
        root = root.base
    return root


def address(array: Array) -> int:
    """Return the address of the first number of numpy's `array`, which may be empty."""
    return array.ctypes.data


def dtype_name(dtype: Any) -> str:
    """Return the name of a numpy backend's dtype, such as `bfloat16`."""
    return str(dtype)
