"""The messages between the engine on host 0 and the stage processes on the other hosts of a group.

After the load, the messages of tensor parallelism follow (see `engine.ranks.messages`), and the hidden states of each
step as raw frames.
"""

from typing import Literal

import msgspec

from helexa.neuron.engine.ipc.messages import EngineOptions, MemoryGrant
from helexa.neuron.engine.pipeline.model_path import ModelPath
from helexa.neuron.engine.ranks.messages import (
    ClearPages,
    RankAllocated,
    RankLoaded,
    RankProgress,
    RunStep,
    TouchCaches,
)


class OpenStage(msgspec.Struct, frozen=True, kw_only=True, tag="open_stage"):
    """Engine -> stage, as the first message: open the model's files.

    Attributes:
        version: version of the engine's code (see `code_version`). The stage must have the same version.
        model: the model's file or folder.
        stage: number of the stage, from 1.
        options: options of the engine. The stage uses the device and the number of threads of its own host instead.
    """

    version: str
    model: ModelPath
    stage: int
    options: EngineOptions


class StageOpened(msgspec.Struct, frozen=True, kw_only=True, tag="stage_opened"):
    """Stage -> engine: the stage's host has the model's files.

    Attributes:
        digest: digest of the files (see `model_digest`).
        free: bytes of free memory for a part of the model.
        hostname: name of the host.
    """

    digest: str
    free: int
    hostname: str


class LoadStage(msgspec.Struct, frozen=True, kw_only=True, tag="load_stage"):
    """Engine -> stage: load decoder layers.

    Attributes:
        start, stop: first layer, and the layer after the last layer.
        options: as in `OpenStage`, with the dtype and the quantization that the engine chose.
    """

    start: int
    stop: int
    options: EngineOptions


class StageGranted(msgspec.Struct, frozen=True, kw_only=True, tag="stage_granted"):
    """Stage -> engine: the memory that the stage's host grants. The smallest grant of all stages applies.

    Attributes:
        page: bytes of one KV page in the layers of this stage.
        state: bytes of the recurrent state of one sequence in the layers of this stage.
    """

    grant: MemoryGrant
    page: int
    state: int


class AllocateStage(msgspec.Struct, frozen=True, tag="allocate_stage"):
    """Engine -> stage: allocate KV caches and buffers. The stage replies with `RankAllocated`.

    Attributes:
        grant: the smallest grant of all stages.
    """

    grant: MemoryGrant


class StageFailed(msgspec.Struct, frozen=True, tag="stage_failed"):
    """Stage -> engine, instead of another reply: the stage cannot do what the engine sent. The message says why."""

    kind: Literal["model_file", "device", "does_not_fit", "internal"]
    message: str


ToStage = OpenStage | LoadStage | AllocateStage | RunStep | ClearPages | TouchCaches
FromStage = StageOpened | StageGranted | RankProgress | RankLoaded | RankAllocated | StageFailed
