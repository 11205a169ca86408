"""Mixture of experts, one after another, for weights without a fused kernel."""

from collections.abc import Sequence

from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.mixture import WITHOUT_GATE, Clamp, Expert, ExpertShares, Mixture, MixtureOp, Routing
from helexa.neuron.tensors import Tensor


def expert_by_expert(
    ops: Ops,
    experts: Sequence[Expert],
    routing: Routing,
    clamp: Clamp | None = None,
    shares: ExpertShares | None = None,
    act: str = "silu",
) -> MixtureOp:
    """Return an operator that runs one expert after another (see `Ops.mixture`)."""
    step_bytes = ops.step_bytes
    gate_ups = [ops.linear(expert.gate_up, expert.gate_up_bias) for expert in experts]
    downs = [ops.linear([expert.down], expert.down_bias) for expert in experts]
    # `linear` has counted the weights of all experts, but a decode step reads only the chosen experts.
    ops.step_bytes = step_bytes + (ops.step_bytes - step_bytes) * routing.top_k // len(experts)

    def gate(gate_up: Tensor) -> Tensor:
        hidden = ops.activate(gate_up, act) if act == WITHOUT_GATE else ops.gate_mul(gate_up, act)
        return hidden if shares is None else ops.gather(hidden, shares.intermediate)

    def gather(out: Tensor) -> Tensor:
        return out if shares is None else ops.gather(out, shares.hidden)

    return Mixture(routing, gate_ups, downs, clamp, gate, gather)
