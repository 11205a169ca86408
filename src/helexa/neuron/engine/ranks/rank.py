"""The part of a model that one rank after rank 0 computes, as rank 0 controls it by messages."""

import gc
from pathlib import Path

import torch

from helexa.neuron.engine.debug_fault import Faults
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_memory import StepMemory
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.ranks.connect import exchange_for
from helexa.neuron.engine.ranks.messages import (
    Allocate,
    CaptureGraph,
    ClearPages,
    Connect,
    ForgetGraphs,
    FromRank,
    RankAllocated,
    RankCaptured,
    RankMemory,
    ReportMemory,
    RunStep,
    ToRank,
    TouchCaches,
    digest_of,
)
from helexa.neuron.engine.step.step_input import decode_input
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.protocol import Ops


class Rank:
    """A rank that has loaded its part of a model. The rank executes the messages of rank 0, and makes no decisions.

    Args:
        faults: injected faults of this rank.
        memory_fd: descriptor of the memory that the ranks share (see `SharedMemory.create`); -1 if the kernels are
            connected already.
    """

    def __init__(self, model: Decoder, ops: Ops, options: EngineOptions, faults: Faults, memory_fd: int = -1) -> None:
        self._model = model
        self._ops = ops
        self._options = options
        self._faults = faults
        self._memory_fd = memory_fd
        self._runner: Runner | None = None
        self._memory: StepMemory | None = None
        self._steps = 0

    def handle(self, message: ToRank) -> FromRank | None:
        """Execute a message of rank 0. Return the reply, or None if the message has no reply.

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
            case ReportMemory():
                assert self._memory is not None
                return RankMemory(self._memory.read())
            case CaptureGraph():
                return RankCaptured(self._runner.capture(message.bucket) or "")
            case ForgetGraphs():
                self._runner.forget_graphs()
        return None

    def _run(self, runner: Runner, message: RunStep) -> None:
        if message.number != self._steps or message.digest != digest_of(message.data):
            raise ValueError(f"step {message.number} arrived damaged or instead of step {self._steps}")
        self._steps += 1
        runner.follow(decode_input(message.data))

    def _allocate(self, message: Allocate) -> RankAllocated:
        self._runner = None
        gc.collect()  # faults refer to the runner in a circle
        weights = torch.cuda.memory_allocated()
        self._runner = Runner(self._model, self._ops, self._options, message.request, message.grant)
        self._faults.afflict(self._runner)
        self._memory = StepMemory(weights) if message.measure else None
        return RankAllocated()
