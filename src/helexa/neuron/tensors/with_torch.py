"""The torch backend, for GPUs, plain torch on the CPU, and tests."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import dtype as DType

from helexa.neuron.tensors import Tensor

if torch.Tensor is not Tensor:
    Tensor.register(torch.Tensor)  # pyright: ignore[reportAttributeAccessIssue]

pad = torch.nn.functional.pad


def prepare() -> None:
    """Do nothing, because torch needs no preparation."""


def lent(block: memoryview, dtype: DType, give_back: Callable[[memoryview], object]) -> torch.Tensor:
    """Return a torch tensor in `block`; freeing all views calls `give_back(block)`."""
    lease = memoryview(block)
    weakref.finalize(lease, give_back, block).atexit = False
    return torch.frombuffer(lease, dtype=dtype)


def may_be_lent(tensor: torch.Tensor) -> bool:
    """Return True, because torch does not tell whether memory is lent."""
    return True


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of the memory of which torch's `tensor` is a view."""
    return tensor.untyped_storage().data_ptr()


def address(tensor: torch.Tensor) -> int:
    """Return the address of the first number of torch's `tensor`, which may be empty."""
    # `data_ptr()` of an empty tensor is always 0.
    return storage_address(tensor) + int(tensor.storage_offset()) * tensor.itemsize


def dtype_name(dtype: DType) -> str:
    """Return the name of a torch dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def __getattr__(name: str) -> Any:
    return getattr(torch, name)
