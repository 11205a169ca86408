"""Messages between rank 0, the engine process, and the processes of other ranks."""

from hashlib import blake2b
from typing import Literal

import msgspec

from helexa.neuron.engine.execution.step_memory import DeviceMemory
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest
from helexa.neuron.engine.kv_cache_and_prefix_hashes import CacheKind
from helexa.neuron.ops.batch import Bucket

RankErrorKind = Literal["model_file", "device", "out_of_memory", "internal"]


class StageLayers(msgspec.Struct, frozen=True):
    """Decoder layers of a host in a pipeline: the first, and the one after the last."""

    start: int
    stop: int


class LoadRank(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Rank 0 -> rank, first message: load a part of a model (reply: `RankLoaded`)."""

    model: str  # path of the model's file or folder
    options: EngineOptions  # options of the engine; `quant` is the format that rank 0 chose
    kernels: str  # name of the kernels of rank 0 (see `Ops.name`). The rank must have the same kernels.
    rank: int  # number of the rank, from 1
    layers: StageLayers | None = None  # the decoder layers of this host; None for all layers


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """Rank 0 -> rank, after all ranks have loaded: connect to the other ranks."""

    rendezvous: str  # path of the file at which ranks without shared memory meet
    seconds: float  # time limit of the connection, and of one exchange, between ranks without shared memory


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """Rank 0 -> rank: build a runner with a KV cache (reply: `RankAllocated`).

    The new runner replaces an earlier runner, whose memory is released first.
    """

    # memory request and grant, from which the runner takes sizes
    request: MemoryRequest
    grant: MemoryGrant
    measure: bool = False  # whether the rank measures the memory of the following steps, until `ReportMemory` arrives


class ReportMemory(msgspec.Struct, frozen=True, tag="report_memory"):
    """Rank 0 -> rank: end the measurement of steps (reply: `RankMemory`)."""


class CaptureGraph(msgspec.Struct, frozen=True, tag="capture"):
    """Rank 0 -> rank: capture the graph of a bucket (reply: `RankCaptured`)."""

    bucket: Bucket


class ForgetGraphs(msgspec.Struct, frozen=True, tag="forget"):
    """Rank 0 -> rank: release all captured graphs, because a rank's capture failed."""


class RunStep(msgspec.Struct, frozen=True, tag="step"):
    """Rank 0 -> rank: compute a step."""

    number: int  # number of the step, from 0
    data: bytes  # the encoded `StepInput`
    digest: bytes  # digest of `data`


class ClearPages(msgspec.Struct, frozen=True, tag="clear"):
    """Rank 0 -> rank: set the contents of KV pages to zero."""

    pages: list[int]


class TouchCaches(msgspec.Struct, frozen=True, tag="touch"):
    """Rank 0 -> rank: write to the whole KV cache, so that a lack of memory fails now."""


class ReadCache(msgspec.Struct, frozen=True, tag="read_cache"):
    """Rank 0 -> rank: send the contents of a KV page or a state slot.

    The rank replies with `CacheContents`.
    """

    kind: CacheKind
    index: int


class WriteCache(msgspec.Struct, frozen=True, tag="write_cache"):
    """Rank 0 -> rank: replace the contents of a KV page or a state slot."""

    kind: CacheKind
    index: int
    contents: bytes


class RankProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Rank -> rank 0, while loading: bytes of weights read so far."""

    done: int


class RankLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Rank -> rank 0: the rank has loaded its part of the weights."""

    matrix_bytes: int  # bytes of the weight matrices in the rank's memory
    step_bytes: int  # bytes of weights that a decode step reads (see `Ops.step_bytes`)


class RankAllocated(msgspec.Struct, frozen=True, tag="allocated"):
    """Rank -> rank 0: the rank has built the runner that `Allocate` describes."""


class RankMemory(msgspec.Struct, frozen=True, tag="memory"):
    """Rank -> rank 0: the memory that the rank has measured."""

    memory: DeviceMemory


class CacheContents(msgspec.Struct, frozen=True, tag="cache_contents"):
    """Rank -> rank 0: the rank's part of a KV page or a state slot."""

    contents: bytes


class RankCaptured(msgspec.Struct, frozen=True, tag="captured"):
    """Rank -> rank 0: the rank has tried to capture a graph."""

    refusal: str = ""  # why the graph cannot be captured; empty if it was captured


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Rank -> rank 0, instead of a reply: the rank failed. Rank 0 then ends the rank."""

    kind: RankErrorKind
    message: str


Request = Allocate | ReportMemory | CaptureGraph | ReadCache  # messages to which a rank with loaded weights replies

ToRank = LoadRank | Connect | Request | RunStep | ForgetGraphs | ClearPages | TouchCaches | WriteCache
FromRank = RankProgress | RankLoaded | RankAllocated | RankMemory | RankCaptured | CacheContents | RankFailed


def digest_of(data: bytes) -> bytes:
    """Return the digest of an encoded step, which the receiving rank checks."""
    return blake2b(data, digest_size=8).digest()
