"""Qwen3.5 with experts in every feed-forward layer (transformers `modeling_qwen3_5_moe`)."""

from helexa.neuron.models.mixture_config import WithExperts
from helexa.neuron.models.qwen3_5 import Qwen35


class Qwen35Moe(WithExperts, Qwen35):
    """Qwen3.5 with experts, whose weights add up to 1 for each row."""

    normalised = True
