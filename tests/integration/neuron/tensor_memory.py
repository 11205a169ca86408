"""Measure the tensor memory that an object refers to."""

from torch import Tensor

from helexa.neuron.ops.native.packed_weights import PackedMatrix


def tensor_bytes(value: object, seen: dict[int, object]) -> int:
    """Return the bytes of all tensors reachable from `value`, except objects in `seen`. `seen` grows by each object."""
    if id(value) in seen:
        return 0
    seen[id(value)] = value
    if isinstance(value, PackedMatrix):
        return value.data.nbytes
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen[storage.data_ptr()] = value
        return value.nbytes
    if isinstance(value, dict):
        return sum(tensor_bytes(item, seen) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(tensor_bytes(item, seen) for item in value)
    name = f"{type(value).__module__}.{type(value).__name__}"
    if name.startswith("helexa.") and not name.endswith(("Launcher", "Loader", "Ops")):
        return tensor_bytes(vars(value), seen)
    return 0
