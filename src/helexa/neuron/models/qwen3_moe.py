"""Qwen3 with experts in most feed-forward layers (transformers `modeling_qwen3_moe`)."""

from typing import ClassVar

from helexa.neuron.models.mixture_config import WithExperts
from helexa.neuron.models.qwen2 import Qwen2
from helexa.neuron.models.qwen3 import Qwen3


class Qwen3Moe(WithExperts, Qwen3):
    """Qwen3 with experts; either all layers have a sliding window or none."""

    defaults: ClassVar = {**Qwen2.defaults, "max_window_layers": 0, "num_key_value_heads": 4, "num_experts_per_tok": 8}
