"""Bytes that an object of helexa's really holds."""

from torch import Tensor

from helexa.neuron.ops.native.packed import PackedMatrix


def held(thing: object, seen: dict[int, object]) -> int:
    """Bytes of all tensors that can be reached from an object, each once, without those in `seen`."""
    if id(thing) in seen:
        return 0
    seen[id(thing)] = thing
    if isinstance(thing, PackedMatrix):
        return thing.data.nbytes
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen[storage.data_ptr()] = thing
        return thing.nbytes
    if isinstance(thing, dict):
        return sum(held(part, seen) for part in thing.values())
    if isinstance(thing, list | tuple):
        return sum(held(part, seen) for part in thing)
    name = f"{type(thing).__module__}.{type(thing).__name__}"
    if name.startswith("helexa.") and not name.endswith(("Launcher", "Loader", "Ops")):
        return held(vars(thing), seen)
    return 0
