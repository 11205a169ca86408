"""GLM-4.5 to GLM-4.7: experts of DeepSeek-V3, and rotation of half of each head.

Reference: transformers `modeling_glm4_moe`.
"""

from typing import ClassVar

from helexa.neuron.layers.attention import QkNorms
from helexa.neuron.models.mixture_config import WithDeepSeekExperts


class Glm4Moe(WithDeepSeekExperts):
    """Llama with biases on queries, keys and values, norms of heads, and experts."""

    defaults: ClassVar = {
        **WithDeepSeekExperts.defaults,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
    }

    def qk_norms(self) -> QkNorms | None:
        """Return the norms of heads if `use_qk_norm` is true."""
        return QkNorms(self.settings.eps) if self.settings.config.get("use_qk_norm") else None
