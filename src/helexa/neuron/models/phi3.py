"""Phi-3 and Phi-4 (reference: transformers `modeling_phi3`)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.neuron.models.llama import Mistral


class Phi3(Mistral):
    """Mistral with LongRoPE."""

    defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    }

    def rope_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings, with the factors from the tensors of a GGUF file."""
        settings = super().rope_settings(config)
        # Older names of LongRoPE.
        if settings["rope_type"] in ("su", "yarn"):
            settings["rope_type"] = "longrope"
        key = "original_max_position_embeddings"
        settings[key] = config.get(key) or settings.get(key)
        half = int(self.settings.head_dim * settings["partial_rotary_factor"]) // 2
        for kind in ("long", "short"):
            if f"rope_factors_{kind}.weight" in self.loader:
                settings[f"{kind}_factor"] = self.loader.vector(f"rope_factors_{kind}.weight", half).tolist()
        return settings
