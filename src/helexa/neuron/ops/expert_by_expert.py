"""Mixture of experts that runs one expert after another, for expert weights that no fused kernel supports."""

from collections.abc import Sequence

from torch import Tensor

from helexa.neuron.ops.mixture import Clamp, Expert, ExpertShares, Mixture, MixtureOp, Routing
from helexa.neuron.ops.protocol import Ops


def expert_by_expert(
    ops: Ops,
    experts: Sequence[Expert],
    routing: Routing,
    clamp: Clamp | None = None,
    shares: ExpertShares | None = None,
) -> MixtureOp:
    """Return a mixture operator that runs one expert after another with linear operators of `ops`.

    `Ops.mixture` describes the arguments.
    """
    step_bytes = ops.step_bytes
    gate_ups = [ops.linear(expert.gate_up, expert.gate_up_bias) for expert in experts]
    downs = [ops.linear([expert.down], expert.down_bias) for expert in experts]
    # `linear` has counted the weights of all experts, but a decode step reads only the chosen experts.
    ops.step_bytes = step_bytes + (ops.step_bytes - step_bytes) * routing.chosen // len(experts)

    def gate(gate_up: Tensor) -> Tensor:
        hidden = ops.gate_mul(gate_up, "silu")
        return hidden if shares is None else ops.gather(hidden, shares.intermediate)

    def gather(out: Tensor) -> Tensor:
        return out if shares is None else ops.gather(out, shares.hidden)

    return Mixture(routing, gate_ups, downs, clamp, gate, gather)
