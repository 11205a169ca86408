"""The part of a model that one rank after rank 0 computes, as rank 0 controls it by messages."""

import gc

from helexa.neuron.engine.debug_fault import Faults
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.ranks.messages import (
    Allocate,
    ClearPages,
    FromRank,
    RankAllocated,
    RunStep,
    TouchCaches,
    digest_of,
)
from helexa.neuron.engine.step.step_input import decode_input
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.protocol import Ops


class Rank:
    """A rank that has loaded its part of a model. The rank decides nothing: it does what rank 0 sends.

    Args:
        faults: injected faults of this rank.
    """

    def __init__(self, model: Decoder, ops: Ops, options: EngineOptions, faults: Faults) -> None:
        self._model = model
        self._ops = ops
        self._options = options
        self._faults = faults
        self._runner: Runner | None = None
        self._steps = 0

    def handle(self, message: Allocate | RunStep | ClearPages | TouchCaches) -> FromRank | None:
        """Do what a message of rank 0 says. Return the reply, or None if the message has no reply.

        Raises:
            ValueError: a step is damaged or missing.
        """
        if isinstance(message, Allocate):
            return self._allocate(message)
        assert self._runner is not None
        if isinstance(message, RunStep):
            if message.number != self._steps or message.digest != digest_of(message.data):
                raise ValueError(f"step {message.number} arrived damaged or instead of step {self._steps}")
            self._steps += 1
            self._runner.follow(decode_input(message.data))
        elif isinstance(message, ClearPages):
            self._runner.clear(message.pages)
        else:
            self._runner.touch_caches()
        return None

    def _allocate(self, message: Allocate) -> RankAllocated:
        self._runner = None
        gc.collect()  # faults refer to the runner in a circle
        self._runner = Runner(self._model, self._ops, self._options, message.request, message.grant)
        self._faults.afflict(self._runner)
        return RankAllocated()
