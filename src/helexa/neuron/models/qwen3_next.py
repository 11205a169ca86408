"""Qwen3-Next: the hybrid that Qwen3.5 continued, with experts (transformers `modeling_qwen3_next`)."""

from helexa.neuron.models.qwen3_5 import Qwen35
from helexa.neuron.models.with_experts import WithExperts


class Qwen3Next(WithExperts, Qwen35):
    """Its projections of the linear layers are grouped by key head, which `GatedDeltaNet` knows by their names."""

    normalised = True
