"""Hunyuan, dense models of version 1.

Reference: transformers `modeling_hunyuan_v1_dense`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.neuron.layers.attention import QkNorms
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.settings import TensorNames


class HunyuanDense(Llama):
    """Llama with norms on query and key heads, after the rotation."""

    defaults: ClassVar = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    names = TensorNames(head_norms=("query_layernorm", "key_layernorm"))

    def qk_norms(self) -> QkNorms:
        """Return norms of each head that follow the rotation."""
        return QkNorms(self.settings.eps, names=self.names.head_norms, last=True)

    def rope_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings."""
        settings = super().rope_settings(config)
        alpha, width = settings.get("alpha"), self.settings.head_dim
        # Not NTK scaling by length: with `alpha`, the base has a constant factor.
        if settings["rope_type"] == "dynamic" and alpha:
            settings |= {"rope_type": "default", "rope_theta": settings["rope_theta"] * alpha ** (width / (width - 2))}
        return settings
