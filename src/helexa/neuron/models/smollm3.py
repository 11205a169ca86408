"""SmolLM3: Llama without rotation in every fourth layer.

Reference: transformers `modeling_smollm3`.
"""

from typing import ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.rope import Rope, no_rotation
from helexa.neuron.models.llama import Llama


class SmolLM3(Llama):
    """Llama with NoPE in some layers (Kazemnejad et al., 2023), maybe with windows."""

    defaults: ClassVar = {
        "max_position_embeddings": 32768,
        "no_rope_layer_interval": 4,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    }
    types = ("full_attention", "sliding_attention")

    def prepare(self) -> None:
        """Determine the layers with rotation, before the work of `Llama.prepare`.

        Raises:
            ModelFileError: `no_rope_layers` is not a list of 0 or 1 per layer, or `layer_types` lists sliding attention
                but `use_sliding_window` is not true.
        """
        settings = self.settings
        rotates = settings.config.get("no_rope_layers")
        if rotates is None:
            interval = settings.positive("no_rope_layer_interval")
            rotates = [int((index + 1) % interval != 0) for index in range(settings.layers)]
        if not isinstance(rotates, list) or len(rotates) < settings.layers or not all(n in (0, 1) for n in rotates):
            raise ModelFileError("config: 'no_rope_layers' must be a list of 0 or 1 per layer, 0 for no rotation")
        self._rotates = rotates
        self._no_rotation = no_rotation(settings.head_dim, self.loader.ops)
        super().prepare()
        if "sliding_attention" in self.layer_types:
            settings.require(use_sliding_window=(True,))

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`: NoPE layers may have a sliding window."""
        config = self.settings.config
        windowed = config.get("use_sliding_window") and config.get("sliding_window") is not None
        return "sliding_attention" if windowed and not self._rotates[index] else "full_attention"

    def rope_of(self, index: int) -> Rope:
        """Return the rotary embedding of layer `index`; it may rotate nothing."""
        return super().rope_of(index) if self._rotates[index] else self._no_rotation
