"""The base class of models with a mixture of experts in their feed-forward layers."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.experts import ExpertReader
from helexa.neuron.layers.moe import SharedExpert, SparseMoe
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.settings import Settings
from helexa.neuron.ops.mixture import Routing


class WithExperts(Llama):
    """A mixin that replaces the MLPs of some or all layers with a mixture of experts.

    In a subclass, list this class before the dense model, as in `class Qwen3Moe(WithExperts, Qwen3)`.
    """

    normalised: ClassVar[bool] = False
    """Default of the setting `norm_topk_prob`: whether the weights of the selected experts are scaled to a sum of 1."""

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """Read and return the feed-forward layer of decoder layer `index`: a mixture of experts or a dense MLP.

        The setting `mlp_only_layers` lists indexes of layers with a dense MLP. Of the other layers, each layer whose
        number, counted from 1, is a multiple of `decoder_sparse_step` (default 1) has a mixture of experts.
        """
        settings, config, hidden = self.settings, self.settings.config, self.settings.hidden
        dense = config.get("mlp_only_layers") or []
        if index in dense or (index + 1) % settings.positive("decoder_sparse_step", 1):
            return super().mlp(index, prefix)
        count, chosen = expert_counts(settings)
        normalised = config.get("norm_topk_prob", self.normalised)
        shared = None
        if config.get("shared_expert_intermediate_size"):
            width = settings.positive("shared_expert_intermediate_size")
            shared = SharedExpert(self.loader, prefix, hidden=hidden, intermediate=width)
        return SparseMoe(
            self.loader,
            f"{prefix}.gate",
            ExpertReader(self.loader, f"{prefix}.experts", count),
            Routing(chosen, "normalised" if normalised else "shares"),
            hidden=hidden,
            intermediate=settings.positive("moe_intermediate_size"),
            shared=shared,
        )


def expert_counts(settings: Settings) -> tuple[int, int]:
    """Return the number of experts in a layer, and the number of experts that each row (token) uses.

    Raises:
        ModelFileError: a row would use more experts than the layer has, or a setting is missing.
    """
    experts = settings.positive("num_experts" if "num_experts" in settings.config else "num_local_experts")
    chosen = settings.positive("num_experts_per_tok")
    if chosen > experts:
        raise ModelFileError(f"config: 'num_experts_per_tok' is {chosen}, there are {experts} experts")
    return experts, chosen
