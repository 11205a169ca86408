"""Qwen3 with a mixture of experts in some or all layers (reference: transformers `modeling_qwen3_moe`)."""

from typing import ClassVar

from helexa.neuron.models.mixture_config import WithExperts
from helexa.neuron.models.qwen2 import Qwen2
from helexa.neuron.models.qwen3 import Qwen3


class Qwen3Moe(WithExperts, Qwen3):
    """Qwen3 with a mixture of experts. If `use_sliding_window` is true, all layers have a sliding window."""

    defaults: ClassVar = {**Qwen2.defaults, "max_window_layers": 0, "num_key_value_heads": 4, "num_experts_per_tok": 8}
