"""LFM2: short convolutions in most layers, attention in the others.

References: transformers `modeling_lfm2`, `modeling_lfm2_moe`.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.core.errors import UnsupportedModelError
from helexa.neuron import tensors
from helexa.neuron.layers.block import Mixer
from helexa.neuron.layers.short_convolution import GatedShortConvolution
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.settings import TensorNames
from helexa.neuron.models.with_experts import WithExperts
from helexa.neuron.ops.expert_routing_and_mixture import Routing

_CONV_BIAS = re.compile(r"model\.layers\.\d+\.conv\.(?:conv|in_proj|out_proj)\.bias", re.ASCII)


class Lfm2(Llama):
    """Llama with a short convolution instead of attention in layers of type `conv`."""

    defaults: ClassVar = {
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "intermediate_size": 12288,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }
    supported: ClassVar = {"block_use_swiglu": (None, True), "use_pos_enc": (None, True)}
    names = TensorNames(
        norm="model.embedding_norm",
        block_norms=("operator_norm", "ffn_norm"),
        mlp="feed_forward",
        projections=("w1", "w3", "w2"),
        expert=("w1", "w3", "w2"),
        output="out_proj",
        head_norms=("q_layernorm", "k_layernorm"),
    )
    types = ("full_attention", "conv")
    recurrent = True
    capturable = False
    qk_norm = True

    @classmethod
    def standard_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config`, also with the keys that `Settings` and `NativeOps` read."""
        standard = super().standard_config(config)
        standard["rms_norm_eps"] = standard["norm_eps"]
        standard["tie_word_embeddings"] = standard.get("tie_embedding", standard["tie_word_embeddings"])
        width = standard.get("block_ff_dim", standard["intermediate_size"])
        # A gated MLP with 2/3 of the width has as many weights as an MLP without a gate. The width is rounded up to a
        # multiple of `block_multiple_of`.
        if standard["block_auto_adjust_ff_dim"]:
            multiplier, unit = standard["block_ffn_dim_multiplier"], standard["block_multiple_of"]
            width = int(2 * width / 3)
            width = width if multiplier is None else int(multiplier * width)
            width = -(-width // unit) * unit
        standard["intermediate_size"] = width
        # Older configurations list the indexes of the attention layers instead of the type of each layer.
        attention = standard.get("full_attn_idxs")
        if standard.get("layer_types") is None and attention is not None:
            layers = range(standard["num_hidden_layers"])
            standard["layer_types"] = ["full_attention" if index in attention else "conv" for index in layers]
        return standard

    def prepare(self) -> None:
        """Call `Llama.prepare`, then check layer types and biases of convolutions.

        Raises:
            ModelFileError: no layer has attention (UnsupportedModelError), or the biases contradict the settings.
        """
        super().prepare()
        if "full_attention" not in self.layer_types:
            raise UnsupportedModelError("config: 'layer_types' must contain 'full_attention', but all are 'conv'")
        self._require_stated_biases("conv_bias", _CONV_BIAS)

    def mixer(self, index: int, prefix: str) -> Mixer:
        """Return the mixer of layer `index`: attention or a gated short convolution."""
        if self.layer_types[index] == "full_attention":
            return super().mixer(index, prefix)
        settings = self.settings
        kernel = settings.positive("conv_L_cache")
        return GatedShortConvolution(self.loader, f"{prefix}.conv", hidden=settings.hidden, kernel=kernel)


class Lfm2Moe(WithExperts, Lfm2):
    """LFM2 with experts, after dense first layers.

    The value of an expert is the sigmoid of its router score. A trained bias per expert influences only which experts
    are chosen.
    """

    defaults: ClassVar = {
        **Lfm2.defaults,
        "block_auto_adjust_ff_dim": False,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "norm_topk_prob": True,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    }
    implemented = ("routed_scaling_factor",)

    def has_experts(self, index: int) -> bool:
        """Return whether layer `index` is after the dense first layers."""
        dense = self.settings.config["num_dense_layers"]
        return index >= (self.settings.positive("num_dense_layers") if dense else 0)

    def routing(self, prefix: str, count: int, top_k: int) -> Routing:
        """Return the routing rule: sigmoids, and `expert_bias` if the model has it."""
        settings, config = self.settings, self.settings.config
        bias = self.loader.vector(f"{prefix}.expert_bias", count) if config["use_expert_bias"] else None
        weights = "normalized" if config["norm_topk_prob"] else "shares"
        factor = settings.number("routed_scaling_factor")
        factors = None if factor == 1 else tensors.full((count,), factor).to(self.loader.ops.device)
        return Routing(top_k, weights, "sigmoid", bias, factors=factors)
