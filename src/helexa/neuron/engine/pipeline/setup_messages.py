"""The messages from a member of a host group to its stage process, before the engine uses the connection."""

import msgspec

from helexa.neuron.engine.ipc.channel import ChannelState


class StageSetup(msgspec.Struct, frozen=True, kw_only=True, tag="stage_setup"):
    """Member -> its stage process, as the first message: how to use the connection to the engine.

    Attributes:
        channel: state of the channel.
        device, threads: device of this host, and CPU threads of each rank (0: one per physical core).
    """

    channel: ChannelState
    device: str
    threads: int


class MemoryDenied(msgspec.Struct, frozen=True, tag="memory_denied"):
    """Member -> its stage process: the stage does not fit into the free memory; the message says why."""

    message: str
