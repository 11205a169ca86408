"""Mistral: Llama with an optional sliding window in all layers (transformers `modeling_mistral`).

Ministral mixes layers with and without a window; its configuration lists the layer types.
"""

from typing import ClassVar

from helexa.neuron.models.llama import Llama


class Mistral(Llama):
    """Llama with a sliding window, unless `sliding_window` is null."""

    defaults: ClassVar = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
    types = ("full_attention", "sliding_attention")

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`, which is the same for all layers."""
        return "full_attention" if self.settings.config["sliding_window"] is None else "sliding_attention"
