"""Qwen3 (dense): Llama with each query and key head normalised before rotation (transformers `modeling_qwen3`)."""

from helexa.neuron.models.llama import Llama


class Qwen3(Llama):
    """The head dimension is given by the configuration and need not be hidden / heads."""

    qk_norm = True
