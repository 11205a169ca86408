"""Mixture of experts that runs one expert after another, for expert weights that no fused kernel supports."""

from collections.abc import Sequence

from helexa.neuron.ops.mixture import Clamp, Expert, Mixture, MixtureOp, Routing
from helexa.neuron.ops.protocol import Ops


def expert_by_expert(ops: Ops, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None = None) -> MixtureOp:
    """Return an operator that runs the experts one after another with linear operators of `ops` (see `Ops.mixture`)."""
    step_bytes = ops.step_bytes
    gate_ups = [ops.linear(expert.gate_up, expert.gate_up_bias) for expert in experts]
    downs = [ops.linear([expert.down], expert.down_bias, "silu") for expert in experts]
    # `linear` counted the weights of all experts, but a decode step reads only the experts that one row uses.
    ops.step_bytes = step_bytes + (ops.step_bytes - step_bytes) * routing.chosen // len(experts)
    return Mixture(routing, gate_ups, downs, clamp)
