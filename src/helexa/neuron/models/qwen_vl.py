"""Text models of the vision-language models of Qwen, whose positions have the axes time, height and width.

References: transformers `modeling_qwen2_5_vl`, `modeling_qwen3_vl` and `modeling_qwen3_vl_moe`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.neuron.layers.rope import rope_settings
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.qwen2 import Qwen2
from helexa.neuron.models.qwen3 import Qwen3
from helexa.neuron.models.qwen3_moe import Qwen3Moe


class WithImagePositions(Llama):
    """A mixin for rotary embeddings with three axes (M-RoPE; Wang et al., 2024). All axes of a text token are the same.

    In a subclass, list this class before the text model, as in `class Qwen3Vl(WithImagePositions, Qwen3)`.
    """

    sections: ClassVar[tuple[int, int, int]]
    """Default of the setting `mrope_section`: number of rotary frequencies of each axis."""
    interleaved: ClassVar[bool] = True
    """Whether the frequencies of the axes alternate. If False, the frequencies of an axis are contiguous."""

    def rope_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings in `config`, with the number of frequencies of each axis."""
        settings = rope_settings(config)
        if settings["rope_type"] == "mrope":
            settings["rope_type"] = "default"
        rotated = int(self.settings.head_dim * settings["partial_rotary_factor"])
        if not settings.get("mrope_section") and 2 * sum(self.sections) == rotated:
            settings["mrope_section"] = self.sections
        return {**settings, "mrope_interleaved": self.interleaved}


class Qwen25Vl(WithImagePositions, Qwen2):
    """Qwen2.5 with positions of images."""

    sections = (16, 24, 24)
    interleaved = False


class Qwen3Vl(WithImagePositions, Qwen3):
    """Qwen3 with positions of images. The vision tower also changes the hidden states after the first layers."""

    sections = (24, 20, 20)


class Qwen3VlMoe(WithImagePositions, Qwen3Moe):
    """Qwen3-VL with a mixture of experts. The weights of the experts that a row (token) uses add up to 1."""

    sections = (24, 20, 20)
    normalised = True
