"""The tensor of the numpy backend: a numpy array with methods of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from helexa.neuron.tensors import Tensor

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_NDARRAY: Any = np.ndarray
_VIEW, _TRANSPOSE = _NDARRAY.view, _NDARRAY.transpose
_np: Any = np  # its functions return arrays of the class of their arguments


@dataclass(frozen=True)
class CpuDevice:
    """The device of all numpy arrays."""

    type: str = "cpu"
    index: int | None = None

    def __str__(self) -> str:
        return self.type


CPU = CpuDevice()


class Array(_NDARRAY):
    """A numpy array that is used like a torch tensor.

    Methods do what torch's documentation says, also if numpy has a method of the same name. Operators, indexing and the
    attributes `shape`, `dtype`, `T`, `nbytes` and `itemsize` are numpy's. Selecting a single number returns a numpy
    scalar.
    """

    device = CPU
    is_cuda = False
    is_meta = False
    _address: int | None = None

    # Memory and shape

    def view(self, *shape: Any) -> "Array":
        if len(shape) == 1 and isinstance(shape[0], np.dtype | type):
            return _VIEW(self, shape[0])
        return self.reshape(sizes_of(shape), copy=False)

    def unflatten(self, dim: int, sizes: Sequence[int]) -> "Array":
        dim %= self.ndim
        return self.reshape((*self.shape[:dim], *sizes, *self.shape[dim + 1 :]))

    def flatten(self, start: int = 0, end: int = -1) -> "Array":
        start, end = start % max(self.ndim, 1), end % max(self.ndim, 1)
        count = int(np.prod(self.shape[start : end + 1], dtype=np.int64))
        return self.reshape((*self.shape[:start], count, *self.shape[end + 1 :]))

    def transpose(self, first: int, second: int) -> "Array":
        return self.swapaxes(first, second)

    def movedim(self, source: int, target: int) -> "Array":
        order = [dim for dim in range(self.ndim) if dim != source]
        order.insert(target, source)
        return _TRANSPOSE(self, order)

    def unsqueeze(self, dim: int) -> "Array":
        return _np.expand_dims(self, dim)

    def squeeze(self, dim: int | None = None) -> "Array":
        if dim is None:
            return super().squeeze()
        return self if self.shape[dim] != 1 else super().squeeze(dim)

    def expand(self, *shape: Any) -> "Array":
        sizes = sizes_of(shape)
        own = (1,) * (len(sizes) - self.ndim) + self.shape
        sizes = [have if size == -1 else size for size, have in zip(sizes, own, strict=True)]
        return _np.broadcast_to(self, sizes, subok=True)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple["Array", ...]:
        total, index = self.shape[dim], [slice(None)] * self.ndim
        parts: list[Array] = []
        if isinstance(sizes, int):
            sizes = [min(sizes, total - start) for start in range(0, max(total, 1), sizes)]
        start = 0
        for size in sizes:
            index[dim] = slice(start, start + size)
            parts.append(self[tuple(index)])
            start += size
        if start != total:
            raise ValueError(f"the part sizes {list(sizes)} do not add up to {total}, the size of the dimension")
        return tuple(parts)

    def unbind(self, dim: int = 0) -> tuple["Array", ...]:
        return tuple(np.moveaxis(self.numpy(), dim, 0).view(Array))

    def repeat(self, *counts: int) -> "Array":
        return _np.tile(self.numpy(), counts).view(Array)

    def repeat_interleave(self, repeats: Any, dim: int | None = None) -> "Array":
        return super().repeat(repeats, dim)

    def contiguous(self) -> "Array":
        return self if self.flags.c_contiguous else self.clone()

    def clone(self, memory_format: object = None) -> "Array":
        return self.copy("C")

    def copy_(self, source: "Array", non_blocking: bool = False) -> "Array":
        self[...] = source
        return self

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.size

    def stride(self, dim: int) -> int:
        return self.strides[dim] // self.itemsize

    def data_ptr(self) -> int:
        address = self._address
        if address is None:  # numpy needs 2 µs for each address, and each step needs the addresses of all weights
            address = self._address = self.ctypes.data
        return address

    def numpy(self) -> np.ndarray:
        return _VIEW(self, np.ndarray)

    def cpu(self) -> "Array":
        return self

    # Dtypes

    def to(self, *targets: Any, dtype: Any = None, copy: bool = False, non_blocking: bool = False) -> "Array":
        """Return the array in another dtype. Devices among `targets` are ignored."""
        for target in targets:
            if isinstance(target, np.dtype):
                dtype = target
        return self.astype(self.dtype if dtype is None else dtype, copy=copy)

    def float(self) -> "Array":
        return self.astype(np.float32, copy=False)

    def double(self) -> "Array":
        return self.astype(np.float64, copy=False)

    def half(self) -> "Array":
        return self.astype(np.float16, copy=False)

    def bfloat16(self) -> "Array":
        return self.astype(_BFLOAT16, copy=False)

    def long(self) -> "Array":
        return self.astype(np.int64, copy=False)

    def int(self) -> "Array":
        return self.astype(np.int32, copy=False)

    def short(self) -> "Array":
        return self.astype(np.int16, copy=False)

    def byte(self) -> "Array":
        return self.astype(np.uint8, copy=False)

    def new_zeros(self, *shape: Any) -> "Array":
        return _np.zeros(sizes_of(shape), self.dtype).view(Array)

    # Arithmetic

    def add_(self, other: Any) -> "Array":
        return _np.add(self, other, out=self, casting="same_kind")

    def sub_(self, other: Any) -> "Array":
        return _np.subtract(self, other, out=self, casting="same_kind")

    def mul_(self, other: Any) -> "Array":
        return _np.multiply(self, other, out=self, casting="same_kind")

    def bitwise_and_(self, other: Any) -> "Array":
        return _np.bitwise_and(self, other, out=self)

    def bitwise_or_(self, other: Any) -> "Array":
        return _np.bitwise_or(self, other, out=self)

    def bitwise_left_shift_(self, count: Any) -> "Array":
        return _np.left_shift(self, count, out=self)

    def round_(self) -> "Array":
        return _np.rint(self, out=self)

    def clamp(self, min: Any = None, max: Any = None) -> "Array":
        return _np.clip(self, min, max)

    def clamp_(self, min: Any = None, max: Any = None) -> "Array":
        return _np.clip(self, min, max, out=self)

    def masked_fill_(self, mask: "Array", value: Any) -> "Array":
        self[mask] = value
        return self

    def zero_(self) -> "Array":
        self.fill(0)
        return self

    def nan_to_num_(self, nan: Any) -> "Array":
        self[np.isnan(self)] = nan
        return self

    def abs(self) -> "Array":
        return _np.abs(self)

    def neg(self) -> "Array":
        return _np.negative(self)

    def square(self) -> "Array":
        return _np.square(self)

    def floor(self) -> "Array":
        return _np.floor(self)

    def exp(self) -> "Array":
        return _np.exp(self)

    def exp2(self) -> "Array":
        return _np.exp2(self)

    def log(self) -> "Array":
        return _np.log(self)

    def isfinite(self) -> "Array":
        return _np.isfinite(self)

    # Along a dimension

    def sum(self, dim: Any = None, keepdim: bool = False) -> Any:
        return _array(_np.sum(self.numpy(), dim, keepdims=keepdim))

    def mean(self, dim: Any = None, keepdim: bool = False) -> Any:
        return _array(_np.mean(self.numpy(), dim, keepdims=keepdim))

    def amax(self, dim: Any = None, keepdim: bool = False) -> Any:
        return _array(_np.max(self.numpy(), dim, keepdims=keepdim))

    def amin(self, dim: Any = None, keepdim: bool = False) -> Any:
        return _array(_np.min(self.numpy(), dim, keepdims=keepdim))

    def argmax(self, dim: Any = None, keepdim: bool = False) -> Any:
        return super().argmax(dim, keepdims=keepdim)

    # The order is always stable, also with `stable` False, which torch's documentation permits.
    def argsort(self, dim: Any = -1, stable: bool = True) -> "Array":
        return super().argsort(dim, kind="stable")

    def gather(self, dim: Any, index: "Array") -> "Array":
        return _np.take_along_axis(self, index, dim)

    def index_select(self, dim: Any, index: "Array") -> "Array":
        return _np.take(self, index, dim)

    def index_copy_(self, dim: Any, index: "Array", source: "Array") -> "Array":
        assert dim == 0, f"index_copy_ supports only dimension 0, not {dim}"
        self[index] = source
        return self


Tensor.register(Array)  # pyright: ignore[reportAttributeAccessIssue]


class MetaArray(Array):
    """An array without numbers, like a tensor on torch's meta device."""

    is_meta = True


def sizes_of(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the sizes that a caller passed one by one or as a sequence."""
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape


def _array(result: Any) -> Any:
    return result.view(Array) if isinstance(result, np.ndarray) else result
