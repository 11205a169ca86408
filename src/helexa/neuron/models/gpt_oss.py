"""gpt-oss: experts in every layer, sinks, and a window in every other layer (transformers `modeling_gpt_oss`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.experts import Experts
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.moe import Router, SparseMoe
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.with_experts import expert_counts
from helexa.neuron.weights.formats import GroupwiseTensor, Weight


class GptOss(Llama):
    """The biases of attention are found by their names in the checkpoint."""

    recorded = False
    sinks = True

    def prepare(self) -> None:
        """See `Decoder`."""
        super().prepare()
        settings = self.settings
        types = settings.layer_types() or ["sliding_attention", "full_attention"] * settings.layers
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise ModelFileError(f"config: 'layer_types' has {min(unknown)!r}, which gpt_oss does not")
        window = settings.positive("sliding_window")
        self._windows = [window if kind == "sliding_attention" else None for kind in types]

    def window(self, index: int) -> int | None:
        """See `Llama`."""
        return self._windows[index]

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """See `Llama`."""
        settings, hidden = self.settings, self.settings.hidden
        count, chosen = expert_counts(settings)
        router = ScoreRouter(
            self.loader, f"{prefix}.router", hidden=hidden, experts=count, chosen=chosen, normalised=True
        )
        experts = ClampedExperts(
            self.loader,
            f"{prefix}.experts",
            hidden=hidden,
            intermediate=settings.intermediate,
            count=count,
            chosen=chosen,
            alpha=float(settings.config.get("swiglu_alpha", 1.702)),
            limit=float(settings.config.get("swiglu_limit", 7.0)),
        )
        return SparseMoe(router, experts)


class ScoreRouter(Router):
    """Compares scores as they are; only the chosen share the weights."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Router`."""
        scores, chosen = torch.topk(self.scores(x), self.chosen, dim=-1)
        return chosen, torch.softmax(scores, dim=-1, dtype=torch.float32)


class ClampedExperts(Experts):
    """`(up + 1) * gate * sigmoid(alpha * gate)`, with `gate` at most `limit` and `up` at most that far from 0.

    In Hugging Face's checkpoints outputs of gate and up alternate, and a tensor that is not quantised has inputs before
    outputs.
    """

    def __init__(self, loader: Loader, prefix: str, *, alpha: float, limit: float, **shape: int) -> None:
        super().__init__(loader, prefix, **shape)
        self._alpha, self._limit = alpha, limit

    def before_gate(self, gate_up: Tensor) -> Tensor:
        """Scales both so that `silu(gate) * up` is what it should be."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate.clamp_(max=self._limit).mul_(self._alpha)
        up.clamp_(-self._limit, self._limit).add_(1).div_(self._alpha)
        return gate_up

    def matrix(self, name: str, shape: tuple[int, int], expert: int) -> Any:
        """See `Experts`."""
        if name.endswith(".weight"):
            return super().matrix(name, shape, expert)
        return self.loader.prepared(f"{name}#{expert}", shape, lambda: self._arranged(name, shape, expert))

    def biases(self, name: str, width: int) -> Tensor:
        """See `Experts`."""
        biases = super().biases(name, width)
        return _gate_first(biases.T).T if name.endswith(".gate_up_proj_bias") else biases

    def _arranged(self, name: str, shape: tuple[int, int], expert: int) -> Weight:
        stored, turned = (self.count, *shape), (self.count, *shape[::-1])
        found = turned if self.loader.checkpoint.shape(name) == turned else stored
        weight = self.loader.weight(name, found, expert)
        if isinstance(weight, Tensor):
            weight = weight.T.contiguous()
        if not name.endswith(".gate_up_proj"):
            return weight
        return weight.each(_gate_first) if isinstance(weight, GroupwiseTensor) else _gate_first(weight)


def _gate_first(rows: Tensor) -> Tensor:
    """Rows of gate and up in turns: first those of gate, then those of up."""
    return torch.cat((rows[0::2], rows[1::2]))
