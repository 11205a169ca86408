"""The base class of models with a mixture of experts in their feed-forward layers."""

from collections.abc import Callable
from typing import ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.layers.moe import ExpertReader, LatentSpace, SharedExpert, SparseMoe
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.settings import Settings
from helexa.neuron.ops.expert_routing_and_mixture import BestGroups, Routing
from helexa.neuron.tensors import Tensor


class WithExperts(Llama):
    """A mixin that replaces the MLPs of some or all layers with a mixture of experts.

    In a subclass, list this class before the dense model, as in `class Qwen3Moe(WithExperts, Qwen3)`.
    """

    # Default of the setting `norm_topk_prob`: whether the weights of the selected experts are scaled to a sum of 1.
    normalized: ClassVar[bool] = False

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """Return the feed-forward layer of layer `index`: experts or a dense MLP."""
        if not self.has_experts(index):
            return super().mlp(index, prefix)
        loader, settings = self.loader, self.settings
        count, top_k = expert_counts(settings)
        return SparseMoe(
            loader,
            f"{prefix}.gate",
            ExpertReader(loader, f"{prefix}.experts", count, self.names.expert),
            self.routing(prefix, count, top_k),
            hidden=settings.hidden,
            intermediate=self.expert_width(),
            shared=self.shared(prefix),
            latent=self.latent(prefix),
        )

    def has_experts(self, index: int) -> bool:
        """Return whether layer `index` has a mixture of experts instead of a dense MLP."""
        # A layer that `mlp_only_layers` does not list has experts if its number, counted from 1, is a multiple of
        # `decoder_sparse_step`.
        dense = self.settings.config.get("mlp_only_layers") or []
        return index not in dense and (index + 1) % self.settings.positive("decoder_sparse_step", 1) == 0

    def expert_width(self) -> int:
        """Return the intermediate size of each expert."""
        return self.settings.positive("moe_intermediate_size")

    def routing(self, prefix: str, count: int, top_k: int) -> Routing:
        """Return the rule that selects `top_k` of `count` experts for each row."""
        normalized = self.settings.config.get("norm_topk_prob", self.normalized)
        return Routing(top_k, "normalized" if normalized else "shares")

    def shared(self, prefix: str) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the expert that all rows use (called as `SharedExpert`); None without."""
        if not self.settings.config.get("shared_expert_intermediate_size"):
            return None
        width = self.settings.positive("shared_expert_intermediate_size")
        names = f"{prefix}.shared_expert", f"{prefix}.shared_expert_gate"
        return SharedExpert(self.loader, *names, hidden=self.settings.hidden, intermediate=width)

    def latent(self, prefix: str) -> LatentSpace | None:
        """Return the projections before and after the experts; None for no projections."""
        return None


class WithDeepSeekExperts(WithExperts):
    """Experts as in DeepSeek-V3 (2024), after dense first layers.

    An expert's value is the sigmoid of its score. The trained bias of an expert, and the groups of experts, influence
    only the choice of experts, not their values.
    """

    defaults: ClassVar = {
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
    }
    implemented = ("first_k_dense_replace", "n_group", "routed_scaling_factor", "scoring_func", "topk_group")
    supported: ClassVar = {
        "hidden_act": (None, "silu"),
        "moe_layer_freq": (None, 1),
        "scoring_func": (None, "sigmoid"),
        "topk_method": (None, "noaux_tc"),
    }

    def has_experts(self, index: int) -> bool:
        """Return whether layer `index` has experts instead of a dense MLP."""
        settings, kinds = self.settings, self.settings.config.get("mlp_layer_types")
        # Without a list of types, the first layers are dense.
        if kinds is None:
            dense = settings.config.get("first_k_dense_replace") or 0
            return index >= (settings.positive("first_k_dense_replace") if dense else 0)
        if not isinstance(kinds, list) or len(kinds) != settings.layers or not {*kinds} <= {"dense", "sparse"}:
            raise ModelFileError(
                f"config: 'mlp_layer_types' is {str(kinds)[:80]}, expected a list with 'dense' or 'sparse' for each of "
                f"{settings.layers} layers"
            )
        return kinds[index] == "sparse"

    def routing(self, prefix: str, count: int, top_k: int) -> Routing:
        """Return DeepSeek-V3's routing rule, with the bias `e_score_correction_bias`."""
        bias = self.loader.vector(f"{prefix}.gate.e_score_correction_bias", count)
        normalized = "normalized" if self.settings.config.get("norm_topk_prob") else "shares"
        return Routing(top_k, normalized, "sigmoid", bias, self.groups(count, top_k, 2), self.factors(count))

    def groups(self, count: int, top_k: int, summed: int) -> BestGroups | None:
        """Return the restriction to `topk_group` of `n_group` groups; None without groups.

        Args:
            summed: number of best experts in a group whose ranks are added to get the rank of the group.

        Raises:
            ModelFileError: `n_group` does not divide the number of experts, a group has fewer than `summed` experts,
                `topk_group` is larger than `n_group`, or the best groups together have fewer than `top_k` experts.
        """
        groups, best = self.settings.positive("n_group", 1), self.settings.positive("topk_group", 1)
        if groups == 1:
            return None
        size = count // groups
        if count % groups:
            raise ModelFileError(f"config: 'n_group' is {groups}, expected a divisor of the number of experts, {count}")
        if size < summed:
            raise ModelFileError(
                f"config: 'n_group' is {groups}, so a group has {size} of {count} experts, expected at least {summed}"
            )
        if best > groups:
            raise ModelFileError(f"config: 'topk_group' is {best}, expected at most 'n_group', {groups}")
        if best * size < top_k:
            raise ModelFileError(
                f"config: 'topk_group' is {best}, so a token can use {best * size} experts, expected at least the "
                f"{top_k} experts of a token"
            )
        return BestGroups(groups, best, summed)

    def factors(self, count: int) -> Tensor | None:
        """Return `routed_scaling_factor` for each of `count` experts; None if it is 1."""
        factor = self.settings.number("routed_scaling_factor")
        return None if factor == 1 else tensors.full((count,), factor).to(self.loader.ops.device)

    def shared(self, prefix: str) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the shared experts as one wider expert without a gate; None without any."""
        if not self.settings.config.get("n_shared_experts"):
            return None
        width = self.settings.positive("n_shared_experts") * self.expert_width()
        names = f"{prefix}.shared_experts", None
        return SharedExpert(self.loader, *names, hidden=self.settings.hidden, intermediate=width)


_EXPERTS = ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts")


def expert_counts(settings: Settings) -> tuple[int, int]:
    """Return the number of experts in a layer, and of experts that a token uses.

    Raises:
        ModelFileError: a token would use more experts than the layer has, or a setting is missing.
    """
    experts = settings.positive(next((key for key in _EXPERTS if key in settings.config), _EXPERTS[-1]))
    key = "moe_k" if "moe_k" in settings.config else "num_experts_per_tok"
    top_k = settings.positive(key)
    if top_k > experts:
        raise ModelFileError(f"config: '{key}' is {top_k}, but there are only {experts} experts")
    return experts, top_k
