"""Mixtures of experts on the native kernels: choice, products and sums in a few kernels for all experts together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from helexa.neuron.ops.mixture import Clamp, Expert, Routing
from helexa.neuron.ops.native_launcher import Launcher, float_bits
from helexa.neuron.ops.packed import PackedMatrix

_MOST_EXPERTS = 4096  # `route` counts them on its stack


class NativeMixture:
    """See `Mixture`. Of equal scores those of the first experts win."""

    def __init__(self, launcher: Launcher, experts: Sequence[Expert], routing: Routing, clamp: Clamp | None) -> None:
        self._launcher = launcher
        self._count, self._routing, self._clamp = len(experts), routing, clamp
        self._gate_up = _Products(launcher, [expert.gate_up for expert in experts], [e.gate_up_bias for e in experts])
        self._down = _Products(launcher, [[expert.down] for expert in experts], [e.down_bias for e in experts])

    @staticmethod
    def fits(experts: Sequence[Expert]) -> bool:
        """Whether the kernels take them: as many as they can count, and all packed alike."""
        forms = {tuple((part.number, part.outputs) for part in (*e.gate_up, e.down)) for e in experts}
        return len(forms) == 1 and len(experts) <= _MOST_EXPERTS

    def __call__(self, x: Tensor, scores: Tensor) -> Tensor:
        """See `MixtureOp`."""
        launcher, rows, chosen, experts = self._launcher, x.shape[0], self._routing.chosen, self._count
        if rows == 0:
            return launcher.take(*x.shape)
        pairs, places = launcher.take(rows * chosen, dtype=torch.int32), launcher.take(rows, chosen, dtype=torch.int64)
        starts, weights = launcher.take(experts + 1, dtype=torch.int64), launcher.take(rows, chosen)
        normalised = self._routing.weights != "shares"
        launcher.launch("route", scores, pairs, starts, places, weights, rows, experts, chosen, normalised)
        gate_up = self._gate_up(launcher.choose_rows(x, pairs), starts, gated=False)
        if self._clamp is not None:
            alpha, limit = float_bits(self._clamp.alpha), float_bits(self._clamp.limit)
            launcher.launch("clamp_gate_up", gate_up, len(gate_up), gate_up.shape[1] // 2, alpha, limit)
        made = self._down(gate_up, starts, gated=True)
        out = launcher.take(*x.shape)
        launcher.launch("sum_pairs", made, places, weights, out, rows, chosen, x.shape[1])
        return out


class _Products:
    """One product for each expert with the pairs that chose it."""

    def __init__(
        self, launcher: Launcher, parts: Sequence[Sequence[PackedMatrix]], biases: Sequence[Tensor | None]
    ) -> None:
        self._launcher = launcher
        self._parts = parts  # which also keeps the memory at these addresses
        self._addresses = torch.tensor([[part.data.data_ptr() for part in own] for own in zip(*parts, strict=True)])
        found = [bias.float() for bias in biases if bias is not None]
        self._biases = torch.stack(found).contiguous() if found else None
        self._outputs = sum(part.outputs for part in parts[0])

    def __call__(self, x: Tensor, starts: Tensor, gated: bool) -> Tensor:
        """float32 [pairs, K], or [pairs, 2 * K] that a gate makes [pairs, K] -> float32 [pairs, N]."""
        launcher, pairs, experts, columns = self._launcher, x.shape[0], len(self._parts), self._parts[0][0].columns
        out = launcher.take(pairs, self._outputs)
        inputs: dict[bool, Tensor] = {}
        for plain in {part.number is None for part in self._parts[0]}:
            if plain:
                inputs[plain] = launcher.take(pairs, columns, dtype=torch.bfloat16)
                launcher.launch("narrow", launcher.gate_mul(x, "silu") if gated else x, inputs[plain], pairs, columns)
            else:
                inputs[plain] = launcher.take_rounded(pairs, columns)
                launcher.launch("quantise_experts", starts, experts, x, inputs[plain], columns, gated, launcher.x_bits)
        first = 0
        for part, addresses in zip(self._parts[0], self._addresses, strict=True):
            bias = 0 if self._biases is None else self._biases.data_ptr() + 4 * first
            number = -1 if part.number is None else part.number
            to, shape = out.data_ptr() + 4 * first, (columns, part.outputs, self._outputs)
            first += part.outputs
            launcher.launch(
                "multiply_experts",
                *(starts, experts, inputs[part.number is None], addresses, to, bias, *shape, number, launcher.x_bits),
                waits=first == self._outputs,
            )
        return out
