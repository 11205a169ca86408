"""Llama with a mixture of experts: ERNIE 4.5, GLM 4.5, MiniMax-M2 and OLMoE.

References: transformers `modeling_ernie4_5_moe`, `modeling_glm4_moe`, `modeling_minimax_m2`, `modeling_olmoe`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.attention import QkNorms
from helexa.neuron.layers.moe import SharedExpert
from helexa.neuron.models.settings import TensorNames
from helexa.neuron.models.with_experts import WithDeepSeekExperts, WithExperts
from helexa.neuron.ops.expert_routing_and_mixture import Routing


class Ernie45Moe(WithExperts):
    """ERNIE 4.5 MoE: Llama with experts; the rotation pairs adjacent numbers.

    The value of an expert is its share of the softmax over all router scores. A trained bias per expert influences only
    which experts are chosen.
    """

    defaults: ClassVar = {
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
    interleaved = True

    def has_experts(self, index: int) -> bool:
        """Return whether layer `index` has experts."""
        config, layers = self.settings.config, self.settings.layers
        first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
        if type(first) is not int or type(last) is not int:
            raise ModelFileError(
                f"config: 'moe_layer_start_index' is {first!r} and 'moe_layer_end_index' is {last!r}, expected whole "
                "numbers"
            )
        if not first <= index <= (layers - 1 if last == -1 else last):
            return False
        # Between `first` and `last`, a layer has experts if its number, counted from 1, is a multiple of the interval.
        return (index + 1) % self.settings.positive("moe_layer_interval") == 0

    def routing(self, prefix: str, count: int, top_k: int) -> Routing:
        """Return the routing rule, with the bias from a tensor [1, experts]."""
        bias = self.loader.plain(f"{prefix}.moe_statics.e_score_correction_bias", (1, count))
        return Routing(top_k, "normalized", bias=bias.view(count))

    def shared(self, prefix: str) -> SharedExpert | None:
        """Return the shared experts as one wider expert without a gate; None without any."""
        if not self.settings.config["moe_num_shared_experts"]:
            return None
        width = self.settings.positive("moe_num_shared_experts") * self.expert_width()
        names = f"{prefix}.shared_experts", None
        return SharedExpert(self.loader, *names, hidden=self.settings.hidden, intermediate=width)


class Glm4Moe(WithDeepSeekExperts):
    """GLM-4 MoE: Llama with experts, head norms, and query, key and value biases."""

    defaults: ClassVar = {
        **WithDeepSeekExperts.defaults,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    }

    def qk_norms(self) -> QkNorms | None:
        """Return the norms of query and key heads; None unless `use_qk_norm` is true."""
        return QkNorms(self.settings.eps) if self.settings.config.get("use_qk_norm") else None


class MiniMaxM2(WithExperts):
    """MiniMax-M2: Llama with experts, and norms over all query and all key heads.

    The value of an expert is the sigmoid of its router score. A trained bias per expert influences only which experts
    are chosen.
    """

    defaults: ClassVar = {
        "head_dim": 128,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "rope_theta": 5_000_000.0,
    }
    implemented = ("scoring_func",)
    supported: ClassVar = {
        "hidden_act": (None, "silu"),
        "qk_norm_type": (None, "per_layer"),
        "scoring_func": (None, "sigmoid"),
        "shared_intermediate_size": (None, 0),
        "use_qk_norm": (None, True),
        "use_routing_bias": (None, True),
    }
    names = TensorNames(mlp="block_sparse_moe", expert=("w1", "w3", "w2"))

    def prepare(self) -> None:
        """Check that all layers have full attention, then call `Llama.prepare`."""
        self.settings.require(attn_type_list=(None, [1] * self.settings.layers))
        super().prepare()

    def rope_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings, with the rotated fraction from `rotary_dim`."""
        settings = super().rope_settings(config)
        # Released configurations state the number of rotated numbers instead of the fraction.
        if settings["partial_rotary_factor"] == 1 and config.get("rotary_dim") is not None:
            settings["partial_rotary_factor"] = self.settings.positive("rotary_dim") / self.settings.head_dim
        return settings

    def qk_norms(self) -> QkNorms:
        """Return two norms: one over all query heads, one over all key heads."""
        return QkNorms(self.settings.eps, whole=True)

    def expert_width(self) -> int:
        """Return the intermediate size of each expert: `intermediate_size`."""
        return self.settings.intermediate

    def routing(self, prefix: str, count: int, top_k: int) -> Routing:
        """Return the routing rule: sigmoids, and the bias `e_score_correction_bias`."""
        bias = self.loader.vector(f"{prefix}.e_score_correction_bias", count)
        return Routing(top_k, "normalized", "sigmoid", bias)


class Olmoe(WithExperts):
    """OLMoE: Llama with experts, and norms over all query heads and all key heads."""

    defaults: ClassVar = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}

    def qk_norms(self) -> QkNorms:
        """Return two norms: one over all query heads, one over all key heads."""
        return QkNorms(self.settings.eps, whole=True)

    def expert_width(self) -> int:
        """Return the intermediate size of each expert: `intermediate_size`."""
        return self.settings.intermediate
