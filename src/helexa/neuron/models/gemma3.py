"""Gemma 1 to 3, text models only.

References: transformers `modeling_gemma`, `modeling_gemma2`, `modeling_gemma3`.
"""

from collections.abc import Mapping
from typing import ClassVar

from helexa.neuron import tensors
from helexa.neuron.layers.rope import Rope
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.settings import TensorNames
from helexa.neuron.tensors import Tensor

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


class Gemma(Llama):
    """Gemma: Llama with norms that multiply by `1 + w`, and scaled embeddings."""

    defaults: ClassVar = {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    # The configurations of released models say "gelu", which transformers reads as the tanh approximation.
    supported: ClassVar = {
        "hidden_act": (None, "gelu", "gelu_pytorch_tanh"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
    }
    half = False
    norm_offset = 1.0
    act = "gelu_tanh"

    def prepare(self) -> None:
        """Call `Llama.prepare`, then compute the factor that multiplies the embeddings."""
        super().prepare()
        self._factor = float(tensors.tensor(self.settings.hidden**0.5, dtype=self.loader.ops.dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of T token ids times sqrt(H), as float32 [T, H]."""
        # The square root is rounded to the activation dtype, because the model was trained with the rounded factor.
        return self.embedding(tokens, self._factor)


class Gemma2(Gemma):
    """Gemma 2: norms around attention and MLP, sliding windows and soft caps."""

    defaults: ClassVar = {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }
    implemented = ("attn_logit_softcapping", "final_logit_softcapping")
    supported: ClassVar = {"hidden_activation": (None, "gelu_pytorch_tanh")}
    names = TensorNames(
        block_norms=("input_layernorm", "pre_feedforward_layernorm"),
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    )
    types = ("full_attention", "sliding_attention")

    def layer_type(self, index: int) -> str:
        """Return full attention for every `sliding_window_pattern`-th layer, else sliding."""
        is_sliding = (index + 1) % self.settings.positive("sliding_window_pattern")
        return "sliding_attention" if is_sliding else "full_attention"

    def scale(self) -> float:
        """Return the attention scale: 1 / sqrt of the setting `query_pre_attn_scalar`."""
        return self.settings.positive("query_pre_attn_scalar") ** -0.5


class Gemma3(Gemma2):
    """Gemma 3: Gemma 2 with norms on query and key heads, without soft caps."""

    defaults: ClassVar = {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    }
    implemented = ()
    qk_norm = True

    def ropes(self) -> Mapping[str, Rope]:
        """Return a rotary embedding for each layer type: full and sliding attention."""
        # In older configurations, the setting `rope_scaling` applies only to full-attention layers, and the setting
        # `rope_local_base_freq` is the rotary base frequency of sliding-window layers.
        config = self.settings.config
        rope_parameters = config.get("rope_parameters") or {}
        global_settings = {
            "rope_theta": config.get("rope_theta") or _GLOBAL_THETA,
            **(rope_parameters.get("full_attention") or {}),
        }
        local_settings = {
            "rope_theta": config.get("rope_local_base_freq") or _LOCAL_THETA,
            **(rope_parameters.get("sliding_attention") or {}),
        }
        return {
            "full_attention": self.rope({"rope_parameters": {**global_settings, **(config.get("rope_scaling") or {})}}),
            "sliding_attention": self.rope({"rope_parameters": local_settings}),
        }
