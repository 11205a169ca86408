"""Mistral: Llama whose layers may all look through a sliding window (transformers `modeling_mistral`).

Ministral, which mixes layers with a window and without, states their types.
"""

from typing import ClassVar

from helexa.neuron.models.llama import Llama


class Mistral(Llama):
    """A `sliding_window` of null is none."""

    defaults: ClassVar = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
    types = ("full_attention", "sliding_attention")

    def layer_type(self, index: int) -> str:
        """See `Llama`."""
        return "full_attention" if self.settings.config["sliding_window"] is None else "sliding_attention"
