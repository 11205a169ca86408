"""The messages between rank 0, which is the engine process, and the processes of the other ranks."""

from hashlib import blake2b
from typing import Literal

import msgspec

from helexa.neuron.engine.execution.device_memory import DeviceMemory
from helexa.neuron.engine.ipc.messages import EngineOptions, MemoryGrant, MemoryRequest
from helexa.neuron.ops.batch import Bucket

RankErrorKind = Literal["model_file", "device", "out_of_memory", "internal"]


class StageLayers(msgspec.Struct, frozen=True):
    """The decoder layers of a host in a pipeline: the first layer, and the layer after the last layer."""

    start: int
    stop: int


class LoadRank(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Rank 0 -> rank, as the first message: load the rank's part of a model. The rank replies with `RankLoaded`.

    Attributes:
        model: path of the model's file or folder.
        options: options of the engine; `quant` is the format that rank 0 chose.
        kernels: name of the kernels of rank 0 (see `Ops.name`). The rank must have the same kernels.
        rank: number of the rank, from 1.
        layers: the decoder layers of this host; None for all layers.
    """

    model: str
    options: EngineOptions
    kernels: str
    rank: int
    layers: StageLayers | None = None


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Rank 0 -> rank, when all ranks have loaded their weights: connect to the other ranks.

    Attributes:
        rendezvous: path of the file at which ranks without shared memory meet.
        seconds: time limit of the connection, and of one exchange, between ranks without shared memory.
    """

    rendezvous: str
    seconds: float


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """Rank 0 -> rank: build a runner with a KV cache and buffers. The rank replies with `RankAllocated`.

    The new runner replaces an earlier runner, whose memory is released first.

    Attributes:
        request, grant: memory request and grant, from which the runner takes sizes.
        measure: whether the rank measures the memory of the following steps, until `ReportMemory` arrives.
    """

    request: MemoryRequest
    grant: MemoryGrant
    measure: bool = False


class ReportMemory(msgspec.Struct, frozen=True, tag="report_memory"):
    """Rank 0 -> rank: end the measurement of steps. The rank replies with `RankMemory`."""


class CaptureGraph(msgspec.Struct, frozen=True, tag="capture"):
    """Rank 0 -> rank: capture the graph of a bucket (batch size). The rank replies with `RankCaptured`."""

    bucket: Bucket


class ForgetGraphs(msgspec.Struct, frozen=True, tag="forget"):
    """Rank 0 -> rank: release all captured graphs, because a rank could not capture a graph."""


class RunStep(msgspec.Struct, frozen=True, tag="step"):
    """Rank 0 -> rank: compute a step.

    Attributes:
        number: number of the step, from 0.
        data: the encoded `StepInput`.
        digest: digest of `data`.
    """

    number: int
    data: bytes
    digest: bytes


class ClearPages(msgspec.Struct, frozen=True, tag="clear"):
    """Rank 0 -> rank: set the contents of KV pages to zero."""

    pages: list[int]


class TouchCaches(msgspec.Struct, frozen=True, tag="touch"):
    """Rank 0 -> rank: write to the whole KV cache, so that missing memory causes an error now."""


class RankProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Rank -> rank 0, while loading: bytes of weights read so far."""

    done: int


class RankLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Rank -> rank 0: the rank has loaded its part of the weights.

    Attributes:
        matrix_bytes: bytes of the weight matrices in the rank's memory.
        step_bytes: bytes of weights that a decode step reads (see `Ops.step_bytes`).
    """

    matrix_bytes: int
    step_bytes: int


class RankAllocated(msgspec.Struct, frozen=True, tag="allocated"):
    """Rank -> rank 0: the rank has built the runner that `Allocate` describes."""


class RankMemory(msgspec.Struct, frozen=True, tag="memory"):
    """Rank -> rank 0: the memory that the rank has measured."""

    memory: DeviceMemory


class RankCaptured(msgspec.Struct, frozen=True, tag="captured"):
    """Rank -> rank 0: the rank has tried to capture a graph.

    Attributes:
        refusal: why the graph cannot be captured; empty if it was captured.
    """

    refusal: str = ""


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Rank -> rank 0, instead of another reply: the rank cannot execute a message. Rank 0 then ends the rank."""

    kind: RankErrorKind
    message: str


Request = Allocate | ReportMemory | CaptureGraph
"""The messages to which a rank that has loaded its weights replies."""

ToRank = LoadRank | Connect | Request | RunStep | ForgetGraphs | ClearPages | TouchCaches
FromRank = RankProgress | RankLoaded | RankAllocated | RankMemory | RankCaptured | RankFailed


def digest_of(data: bytes) -> bytes:
    """Return the digest of an encoded step."""
    return blake2b(data, digest_size=8).digest()
