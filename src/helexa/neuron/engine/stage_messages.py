"""Messages between the engine on host 0 and the stage processes of other hosts.

After the load, the messages of tensor parallelism follow (see `engine.ranks.messages`), and the hidden states of each
step as raw frames of float32 numbers.
"""

from typing import Literal

import msgspec

from helexa.neuron import tensors
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.host_channel import Channel, ChannelError
from helexa.neuron.engine.ipc.messages import MemoryGrant
from helexa.neuron.engine.model_path_and_digest import ModelPath
from helexa.neuron.engine.ranks.messages import (
    ClearPages,
    RankAllocated,
    RankLoaded,
    RankProgress,
    RunStep,
    TouchCaches,
)
from helexa.neuron.tensors import Tensor

_PIECE_BYTES = 16 << 20


class OpenStage(msgspec.Struct, frozen=True, kw_only=True, tag="open_stage"):
    """Engine -> stage, as the first message: open the model's files."""

    version: str  # version of the engine's code (see `node_code_version`). The stage must have the same version.
    model: ModelPath  # the model's file or folder
    stage: int  # number of the stage, from 1
    # Options of the engine. The stage uses the device and the number of threads of its own host instead.
    options: EngineOptions


class StageOpened(msgspec.Struct, frozen=True, kw_only=True, tag="stage_opened"):
    """Stage -> engine: the stage's host has the model's files."""

    digest: str  # digest of the files (see `model_digest`)
    free: int  # bytes of free memory for a part of the model
    hostname: str  # name of the host


class LoadStage(msgspec.Struct, frozen=True, kw_only=True, tag="load_stage"):
    """Engine -> stage: load decoder layers."""

    # first layer, and the layer after the last layer
    start: int
    stop: int
    options: EngineOptions  # as in `OpenStage`, with the dtype and the quantization that the engine chose


class StageGranted(msgspec.Struct, frozen=True, kw_only=True, tag="stage_granted"):
    """Stage -> engine: the memory that the stage's host grants."""

    grant: MemoryGrant  # the upper limits of this stage; `AllocateStage` has the final numbers
    page: int  # bytes of one KV page in the layers of this stage
    state: int  # bytes of the recurrent state of one sequence in the layers of this stage


class AllocateStage(msgspec.Struct, frozen=True, tag="allocate_stage"):
    """Engine -> stage: allocate KV caches and buffers (reply: `RankAllocated`)."""

    grant: MemoryGrant  # the smallest number of pages, of sequences and of snapshots in the grants of all hosts


class StageFailed(msgspec.Struct, frozen=True, tag="stage_failed"):
    """Stage -> engine, instead of a reply: the reason for which the stage failed."""

    kind: Literal["model_file", "device", "does_not_fit", "internal"]
    message: str


ToStage = OpenStage | LoadStage | AllocateStage | RunStep | ClearPages | TouchCaches
FromStage = StageOpened | StageGranted | RankProgress | RankLoaded | RankAllocated | StageFailed


def send_hidden(channel: Channel, hidden: Tensor) -> None:
    """Send hidden states [rows, hidden] as float32 to the other end of the channel.

    Raises:
        ChannelError: the connection is closed.
    """
    data = _bytes_of(hidden.to("cpu", tensors.float32).contiguous())
    # Without rows, one empty frame is sent, because the receiver waits for a frame.
    for start in range(0, max(len(data), 1), _PIECE_BYTES):
        channel.send_bytes(data[start : start + _PIECE_BYTES])


def receive_hidden(channel: Channel, rows: int, width: int) -> Tensor:
    """Wait for hidden states [rows, width] from the other end of the channel.

    Raises:
        ChannelError: the connection is closed, or the other end has sent another number of rows.
    """
    hidden = tensors.empty(rows, width)
    data = _bytes_of(hidden)
    filled = 0
    while True:
        piece = channel.receive_bytes()
        if len(piece) != min(len(data) - filled, _PIECE_BYTES):
            raise ChannelError(
                f"the other host sent {filled + len(piece)} bytes of hidden states, expected {len(data)}; "
                "load the model again"
            )
        data[filled : filled + len(piece)] = piece
        filled += len(piece)
        if filled == len(data):
            return hidden


def _bytes_of(hidden: Tensor) -> memoryview:
    return hidden.view(-1).view(tensors.uint8).numpy().data
