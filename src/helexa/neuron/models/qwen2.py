"""Qwen2 and Qwen2.5 (dense): Llama with biases on queries, keys and values (transformers `modeling_qwen2`)."""

from helexa.neuron.models.llama import Llama


class Qwen2(Llama):
    """The biases are found by their names in the checkpoint; a sliding window is refused as Llama refuses it."""
