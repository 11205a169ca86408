"""MiniMax-M2: experts in all layers, and one norm over all query heads.

Reference: transformers `modeling_minimax_m2`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.neuron.layers.attention import QkNorms
from helexa.neuron.models.mixture_config import WithExperts
from helexa.neuron.models.settings import TensorNames
from helexa.neuron.ops.mixture import Routing


class MiniMaxM2(WithExperts):
    """Llama with experts, and with norms over all query heads and over all key heads.

    The sigmoid of each score is the expert's value. A trained bias of each expert counts for the choice only.
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
        """Check that all layers have full attention, before `Llama.prepare`."""
        self.settings.require(attn_type_list=(None, [1] * self.settings.layers))
        super().prepare()

    def rope_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings."""
        settings = super().rope_settings(config)
        # Released configurations state the number of rotated numbers instead of the fraction.
        if settings["partial_rotary_factor"] == 1 and config.get("rotary_dim") is not None:
            settings["partial_rotary_factor"] = self.settings.positive("rotary_dim") / self.settings.head_dim
        return settings

    def qk_norms(self) -> QkNorms:
        """Return the norms, of which each covers all heads."""
        return QkNorms(self.settings.eps, whole=True)

    def expert_width(self) -> int:
        """Return the intermediate size of each expert: `intermediate_size`."""
        return self.settings.intermediate

    def routing(self, prefix: str, count: int, top_k: int) -> Routing:
        """Return the rule with sigmoids and the bias `e_score_correction_bias`."""
        bias = self.loader.vector(f"{prefix}.e_score_correction_bias", count)
        return Routing(top_k, "normalized", "sigmoid", bias)
