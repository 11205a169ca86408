"""Qwen2 to Qwen3: dense, with a mixture of experts, and with positions of images.

Qwen2 is Llama with biases on queries, keys and values. Qwen3 replaces the biases by a norm of each head.

References: transformers `modeling_qwen2`, `modeling_qwen3`, `modeling_qwen3_moe`, `modeling_qwen2_5_vl`,
`modeling_qwen3_vl`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.neuron.layers.rope import rope_settings
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.mixture_config import WithExperts


class Qwen2(Llama):
    """Llama with attention biases, and an optional sliding window in late layers."""

    defaults: ClassVar = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
    types = ("full_attention", "sliding_attention")

    def prepare(self) -> None:
        """Check the sliding window settings, in addition to the work of `Llama.prepare`.

        Raises:
            ModelFileError: `layer_types` lists sliding attention, but `use_sliding_window` is not true.
        """
        super().prepare()
        if "sliding_attention" in self.layer_types:
            self.settings.require(use_sliding_window=(True,))

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`."""
        config = self.settings.config
        # Only the layers from `max_window_layers` on have a window.
        windowed = config.get("use_sliding_window") and config["sliding_window"] is not None
        return "sliding_attention" if windowed and index >= config["max_window_layers"] else "full_attention"


class Qwen3(Qwen2):
    """Qwen2 with a norm on each query and key head, and heads of 128 by default."""

    defaults: ClassVar = {**Qwen2.defaults, "head_dim": 128}
    qk_norm = True


class Qwen3Moe(WithExperts, Qwen3):
    """Qwen3 with a mixture of experts.

    If `use_sliding_window` is true, all layers have a sliding window.
    """

    defaults: ClassVar = {**Qwen2.defaults, "max_window_layers": 0, "num_key_value_heads": 4, "num_experts_per_tok": 8}


class WithImagePositions(Llama):
    """A mixin for rotations by time, height and width (M-RoPE; Wang et al., 2024).

    In a subclass, list this class before the text model, as in `class Qwen3Vl(WithImagePositions, Qwen3)`.
    """

    # Default of the setting `mrope_section`: number of rotary frequencies of each axis.
    sections: ClassVar[tuple[int, int, int]]
    # Whether the frequencies of the axes alternate. If False, the frequencies of an axis are contiguous.
    axes_alternate: ClassVar[bool] = True

    def rope_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings with the number of frequencies of each axis."""
        settings = rope_settings(config)
        # The key `mrope_section` says the same.
        if settings["rope_type"] == "mrope":
            settings["rope_type"] = "default"
        rotated = int(self.settings.head_dim * settings["partial_rotary_factor"])
        if not settings.get("mrope_section") and 2 * sum(self.sections) == rotated:
            settings["mrope_section"] = self.sections
        return {**settings, "mrope_interleaved": self.axes_alternate}


class Qwen25Vl(WithImagePositions, Qwen2):
    """Qwen2.5 with positions of images."""

    sections = (16, 24, 24)
    axes_alternate = False


class Qwen3Vl(WithImagePositions, Qwen3):
    """Qwen3 with positions of images, and with DeepStack in its vision tower."""

    sections = (24, 20, 20)


class Qwen3VlMoe(WithImagePositions, Qwen3Moe):
    """Qwen3-VL with a mixture of experts."""

    sections = (24, 20, 20)
    normalized = True
