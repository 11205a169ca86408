"""Messages of stage processes and of the check of collectives."""

import msgspec

from helexa.neuron.engine.ipc.channel import ChannelState


class CollectiveResult(msgspec.Struct, frozen=True):
    """The result of one exchange between ranks."""

    operation: str  # `gather` or `sum`
    transport: str  # how the ranks exchange data: `shared memory` or `gloo`
    size: int  # size of the result in bytes
    verified: bool  # whether the result has the expected values
    median_us: float | None  # median duration in microseconds; None if the exchange was not timed


class StageSetup(msgspec.Struct, frozen=True, kw_only=True, tag="stage_setup"):
    """Member -> its stage process, first message: how to reach the engine."""

    channel: ChannelState
    # device of this host, and CPU threads of each rank (0: one per physical core)
    device: str
    threads: int


class MemoryDenied(msgspec.Struct, frozen=True, tag="memory_denied"):
    """Member -> its stage process: why the stage does not fit into free memory."""

    message: str
