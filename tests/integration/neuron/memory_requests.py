"""A memory request with round numbers."""

import msgspec

from helexa.neuron.engine.ipc.messages import MemoryRequest

MIB = 1 << 20


def needs(**fields: object) -> MemoryRequest:
    """Return a memory request; `fields` override the defaults."""
    defaults: dict[str, object] = {
        "device": "cpu",
        "free": 4000 * MIB,
        "limit": 0,
        "held": 0,
        "weights": 1000 * MIB,
        "loading": 100 * MIB,
        "step": 200 * MIB,
        "page_step": 0,
        "position_step": 0,
        "page": MIB,
        "page_size": 64,
        "pages": 512,
        "share": 0.25,
        "context": 8192,
        "state": 0,
        "sequences": 8,
        "snapshots": 0,
    }
    return msgspec.convert(defaults | fields, MemoryRequest)
