"""Qwen3.5 with a mixture of experts in every feed-forward layer (reference: transformers `modeling_qwen3_5_moe`)."""

from helexa.neuron.models.mixture_config import WithExperts
from helexa.neuron.models.qwen3_5 import Qwen35


class Qwen35Moe(WithExperts, Qwen35):
    """Qwen3.5 with a mixture of experts. The weights of the experts that a row (token) uses add up to 1."""

    normalised = True
