"""Qwen3-Next, the predecessor of Qwen3.5, with a mixture of experts (reference: transformers `modeling_qwen3_next`)."""

from helexa.neuron.models.mixture_config import WithExperts
from helexa.neuron.models.qwen3_5 import Qwen35


class Qwen3Next(WithExperts, Qwen35):
    """Qwen3.5 with a mixture of experts, and another row order in the input projections of Gated DeltaNet layers.

    The checkpoint groups the rows of the input projections by key head. `GatedDeltaNet` detects this row order from the
    names of the tensors.
    """

    normalised = True
