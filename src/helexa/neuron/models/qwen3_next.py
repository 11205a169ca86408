"""Qwen3-Next: the hybrid predecessor of Qwen3.5, with experts (transformers `modeling_qwen3_next`)."""

from helexa.neuron.models.mixture_config import WithExperts
from helexa.neuron.models.qwen3_5 import Qwen35


class Qwen3Next(WithExperts, Qwen35):
    """Qwen3.5 with experts, and projections of the linear layers that are grouped by key head.

    `GatedDeltaNet` detects the grouping by the tensors' names.
    """

    normalised = True
