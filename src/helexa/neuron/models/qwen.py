"""Qwen2 to Qwen3.5: dense, with experts, with images, and with Gated DeltaNets.

Qwen2 is Llama with biases on queries, keys and values. Qwen3 replaces the biases by a norm of each head. Qwen3.5 and
Qwen3-Next have Gated DeltaNets in three of four layers.

References: transformers `modeling_qwen2`, `modeling_qwen3`, `modeling_qwen3_moe`, `modeling_qwen2_5_vl`,
`modeling_qwen3_vl`, `modeling_qwen3_5`, `modeling_qwen3_5_moe`, `modeling_qwen3_next`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.core.errors import UnsupportedModelError
from helexa.neuron.layers.block import Mixer
from helexa.neuron.layers.gated_delta import GatedDeltaNet
from helexa.neuron.layers.rope import rope_settings
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.with_experts import WithExperts


class Qwen2(Llama):
    """Llama with attention biases, and an optional sliding window in late layers."""

    defaults: ClassVar = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
    types = ("full_attention", "sliding_attention")

    def prepare(self) -> None:
        """Call `Llama.prepare`, then check the sliding window settings.

        Raises:
            UnsupportedModelError: `layer_types` lists sliding attention, but `use_sliding_window` is not true.
        """
        super().prepare()
        if "sliding_attention" in self.layer_types:
            self.settings.require(use_sliding_window=(True,))

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`: late layers may have a sliding window."""
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

    If `use_sliding_window` is true, and `max_window_layers` is missing, all layers have a sliding window.
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
        """Return rotary settings, with `mrope_section` if it is stated or `sections` fits."""
        settings = rope_settings(config)
        # The type `mrope` is not needed, because the key `mrope_section` already selects M-RoPE.
        if settings["rope_type"] == "mrope":
            settings["rope_type"] = "default"
        rotated = int(self.settings.head_dim * settings["partial_rotary_factor"])
        if not settings.get("mrope_section") and 2 * sum(self.sections) == rotated:
            settings["mrope_section"] = self.sections
        return {**settings, "mrope_interleaved": self.axes_alternate}


class Qwen25Vl(WithImagePositions, Qwen2):
    """Qwen2.5 with rotations by time, height and width for images (M-RoPE)."""

    sections = (16, 24, 24)
    axes_alternate = False


class Qwen3Vl(WithImagePositions, Qwen3):
    """Qwen3 with M-RoPE for images, and with DeepStack in the vision tower."""

    sections = (24, 20, 20)


class Qwen3VlMoe(WithImagePositions, Qwen3Moe):
    """Qwen3-VL with a mixture of experts."""

    sections = (24, 20, 20)
    normalized = True


class Qwen35(WithImagePositions):
    """Llama with Gated DeltaNet in most layers, and gated attention in the others."""

    defaults: ClassVar = {"partial_rotary_factor": 0.25}
    types = ("full_attention", "linear_attention")
    recurrent = True
    capturable = False
    norm_offset = 1.0
    qk_norm = True
    gated = True
    sections = (11, 11, 10)

    def prepare(self) -> None:
        """Call `Llama.prepare`, then check that the model has full and linear attention.

        Raises:
            UnsupportedModelError: all layers have full attention, or all layers have linear attention.
        """
        super().prepare()
        if set(self.layer_types) != set(self.types):
            raise UnsupportedModelError(
                f"config: 'layer_types' must contain both {self.types}, but all are {self.layer_types[0]!r}"
            )

    def layer_type(self, index: int) -> str:
        """Return full attention for every `full_attention_interval`-th layer, else linear."""
        interval = self.settings.positive("full_attention_interval", 4)
        return "linear_attention" if (index + 1) % interval else "full_attention"

    def mixer(self, index: int, prefix: str) -> Mixer:
        """Return the mixer of layer `index`: gated attention or Gated DeltaNet."""
        settings = self.settings
        if self.layer_types[index] == "full_attention":
            return super().mixer(index, prefix)
        return GatedDeltaNet(
            self.loader,
            f"{prefix}.linear_attn",
            hidden=settings.hidden,
            key_heads=settings.positive("linear_num_key_heads", 16),
            heads=settings.positive("linear_num_value_heads", 32),
            key_dim=settings.positive("linear_key_head_dim", 128),
            value_dim=settings.positive("linear_value_head_dim", 128),
            kernel=settings.positive("linear_conv_kernel_dim", 4),
            eps=settings.eps,
        )


class Qwen35Moe(WithExperts, Qwen35):
    """Qwen3.5 with a mixture of experts."""

    normalized = True


class Qwen3Next(WithExperts, Qwen35):
    """Qwen3.5 with a mixture of experts, and joined projections in Gated DeltaNet.

    A checkpoint has one matrix for queries, keys, values and z, whose rows are grouped by key head. `GatedDeltaNet`
    recognizes this matrix by its name.
    """

    normalized = True
