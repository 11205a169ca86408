"""A rank other than rank 0: computes its part of a model as rank 0 commands."""

import gc
from pathlib import Path

from helexa.neuron import tensors
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_memory import StepMemory
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ranks.messages import (
    Allocate,
    CacheContents,
    CaptureGraph,
    ClearPages,
    Connect,
    ForgetGraphs,
    FromRank,
    RankAllocated,
    RankCaptured,
    RankMemory,
    ReadCache,
    ReportMemory,
    RunStep,
    ToRank,
    TouchCaches,
    WriteCache,
    digest_of,
)
from helexa.neuron.engine.step_input_and_graph_sizes import decode_input
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.rank_group_and_shares import Exchange, RankGroup, SharedMemory


def exchange_for(ops: Ops, group: RankGroup, memory_fd: int, rendezvous: Path, seconds: float) -> Exchange:
    """Return the exchange of a rank with the other ranks.

    Native kernels use shared memory. Other kernels use NCCL on GPUs, else gloo, and wait until all ranks have called
    this function.

    Args:
        memory_fd: descriptor from `SharedMemory.create`.
        rendezvous: path of a file that does not exist yet, at which the ranks meet.
        seconds: time limit of one exchange.
    """
    if isinstance(ops, NativeOps):
        return SharedMemory(memory_fd, group.rank)
    from helexa.neuron.ops.distributed_exchange import Distributed  # imports torch

    return Distributed(group, rendezvous, seconds, ops.device)


class Rank:
    """A rank that has loaded its part of a model. It executes the messages of rank 0."""

    def __init__(self, model: Decoder, ops: Ops, options: EngineOptions, memory_fd: int = -1) -> None:
        self._model = model
        self._ops = ops
        self._options = options
        # descriptor of the memory that the ranks share (see `SharedMemory.create`); -1 if the kernels are connected
        # already
        self._memory_fd = memory_fd
        self._runner: Runner | None = None
        self._memory: StepMemory | None = None
        self._steps = 0

    def handle(self, message: ToRank) -> FromRank | None:
        """Execute a message of rank 0, and return its reply; None if it has no reply.

        Raises:
            ValueError: a step is damaged or missing.
        """
        if isinstance(message, Connect):
            rendezvous = Path(message.rendezvous)
            self._ops.connect(exchange_for(self._ops, self._ops.ranks, self._memory_fd, rendezvous, message.seconds))
            return None
        if isinstance(message, Allocate):
            return self._allocate(message)
        assert self._runner is not None
        match message:
            case RunStep():
                self._run(self._runner, message)
            case ClearPages():
                self._runner.clear(message.pages)
            case TouchCaches():
                self._runner.touch_caches()
            case ReadCache():
                return CacheContents(self._runner.read_cache(message.kind, message.index)[0])
            case WriteCache():
                self._runner.write_own_cache(message.kind, message.index, message.contents)
            case ReportMemory():
                assert self._memory is not None
                return RankMemory(self._memory.read())
            case CaptureGraph():
                return RankCaptured(self._runner.capture(message.bucket) or "")
            case ForgetGraphs():
                self._runner.forget_graphs()
        return None

    def _run(self, runner: Runner, message: RunStep) -> None:
        # A rank that computes another step than rank 0 would wait for rank 0 forever, or exchange wrong results.
        if message.number != self._steps or message.digest != digest_of(message.data):
            raise ValueError(
                f"rank 0 sent step {message.number}, but this rank expected step {self._steps} with its correct "
                "checksum; load the model again"
            )
        self._steps += 1
        runner.follow(decode_input(message.data))

    def _allocate(self, message: Allocate) -> RankAllocated:
        # The old caches are released first, because memory may not suffice for old and new caches together.
        self._runner = None
        gc.collect()  # the runner of the measured steps can be in a reference cycle
        weights = tensors.cuda.memory_allocated() if message.measure else 0
        self._runner = Runner(self._model, self._ops, self._options, message.request, message.grant)
        self._memory = StepMemory(weights) if message.measure else None
        return RankAllocated()
