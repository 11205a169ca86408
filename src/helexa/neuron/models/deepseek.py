"""DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash: latent attention and experts.

References: transformers `modeling_deepseek_v2`, `modeling_deepseek_v3`, `modeling_glm4_moe_lite`.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.neuron.layers.latent_attention import LatentAttention, LatentSizes
from helexa.neuron.layers.rope import Rope, rope_settings
from helexa.neuron.models.with_experts import WithDeepSeekExperts
from helexa.neuron.ops.expert_routing_and_mixture import Routing


class DeepSeekV3(WithDeepSeekExperts):
    """Llama with latent attention; sigmoids, biases and groups choose the experts."""

    defaults: ClassVar = {
        **WithDeepSeekExperts.defaults,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "max_position_embeddings": 4096,
        "n_group": 8,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "v_head_dim": 128,
    }

    def rope(self, config: Mapping[str, Any]) -> Rope:
        """Return the rotary embedding of the `qk_rope_head_dim` rotated numbers of a head."""
        rotated = self.settings.positive("qk_rope_head_dim")
        return Rope(self.rope_settings(config), rotated, self.loader.ops, trained_context=self.settings.context)

    def scale(self) -> float:
        """Return the attention scale, which YaRN increases if `mscale_all_dim` is set."""
        settings = self.settings
        scale = (settings.positive("qk_nope_head_dim") + settings.positive("qk_rope_head_dim")) ** -0.5
        rope = rope_settings(settings.config)
        factor, sharpness = rope.get("factor") or 1, rope.get("mscale_all_dim") or 0
        if rope["rope_type"] == "default" or factor <= 1:
            return scale
        # The factor is squared, because it applies to queries and to keys.
        return scale * (0.1 * sharpness * math.log(factor) + 1) ** 2

    def mixer(self, index: int, prefix: str) -> LatentAttention:
        """Return the mixer of layer `index`: latent attention."""
        settings = self.settings
        return LatentAttention(
            self.loader,
            f"{prefix}.self_attn",
            hidden=settings.hidden,
            heads=settings.heads,
            sizes=LatentSizes(
                rank=settings.positive("kv_lora_rank"),
                rotated=settings.positive("qk_rope_head_dim"),
                plain=settings.positive("qk_nope_head_dim"),
                value=settings.positive("v_head_dim"),
                query_rank=None if settings.config.get("q_lora_rank") is None else settings.positive("q_lora_rank"),
            ),
            rope=self.rope_of(index),
            scale=self.scale(),
            interleaved=bool(settings.config.get("rope_interleave")),
        )


class DeepSeekV2(DeepSeekV3):
    """DeepSeek-V3, but a softmax without biases chooses the experts."""

    defaults: ClassVar = {
        **DeepSeekV3.defaults,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 2048,
        "n_group": 1,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "topk_method": "greedy",
    }
    supported: ClassVar = {
        **DeepSeekV3.supported,
        "norm_topk_prob": (None, False),
        "rope_interleave": (True,),
        "scoring_func": (None, "softmax"),
        "topk_method": ("greedy", "group_limited_greedy"),
    }

    def routing(self, prefix: str, count: int, top_k: int) -> Routing:
        """Return the routing rule. Groups, if any, are ranked by their best expert."""
        grouped = self.settings.config["topk_method"] == "group_limited_greedy"
        groups = self.groups(count, top_k, 1) if grouped else None
        return Routing(top_k, "shares", groups=groups, factors=self.factors(count))


class Glm4MoeLite(DeepSeekV3):
    """GLM-4.7-Flash: DeepSeek-V3 without groups."""

    defaults: ClassVar = {
        **DeepSeekV3.defaults,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 202752,
        "n_group": 1,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
    }
