"""What models with experts in their feed-forward layers have in common."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.moe import SparseMoe
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.settings import Settings


class WithExperts(Llama):
    """Put before a dense model among a class's bases, it gives some or all of its layers experts.

    Which of them run depends on the tokens, so a step is not recorded.
    """

    recorded = False
    normalised: ClassVar[bool] = False
    """Whether the weights of a row's experts add up to 1 where the configuration does not say it."""

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """Experts in every `decoder_sparse_step`-th layer but those in `mlp_only_layers`."""
        settings, config = self.settings, self.settings.config
        dense = config.get("mlp_only_layers") or []
        if index in dense or (index + 1) % settings.positive("decoder_sparse_step", 1):
            return super().mlp(index, prefix)
        experts, chosen = expert_counts(settings)
        shared = "shared_expert_intermediate_size"
        return SparseMoe(
            self.loader,
            prefix,
            hidden=settings.hidden,
            intermediate=settings.positive("moe_intermediate_size"),
            experts=experts,
            chosen=chosen,
            normalised=bool(config.get("norm_topk_prob", self.normalised)),
            shared=settings.positive(shared) if config.get(shared) else None,
        )


def expert_counts(settings: Settings) -> tuple[int, int]:
    """How many experts each layer has, and how many of them a row passes."""
    config = settings.config
    experts = settings.positive("num_experts" if "num_experts" in config else "num_local_experts")
    chosen = settings.positive("num_experts_per_tok")
    if chosen > experts:
        raise ModelFileError(f"config: 'num_experts_per_tok' is {chosen}, there are {experts} experts")
    return experts, chosen
