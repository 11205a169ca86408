"""Mistral: Llama with an optional sliding window in all layers (reference: transformers `modeling_mistral`).

Ministral has some layers with and some without a sliding window. The configuration of Ministral lists the layer types.
"""

from typing import ClassVar

from helexa.neuron.models.llama import Llama


class Mistral(Llama):
    """Llama with a sliding window in all layers, or in no layer if `sliding_window` is null in the configuration.

    If the configuration lists `layer_types`, the list determines which layers have a sliding window.
    """

    defaults: ClassVar = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
    types = ("full_attention", "sliding_attention")

    def layer_type(self, index: int) -> str:
        """Return the type of all layers: full attention if `sliding_window` is null, else sliding attention."""
        return "full_attention" if self.settings.config["sliding_window"] is None else "sliding_attention"
