"""Qwen3.5 and Qwen3-Next: Gated DeltaNets in three of four layers.

References: transformers `modeling_qwen3_5`, `modeling_qwen3_5_moe`, `modeling_qwen3_next`.
"""

from typing import ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.block import Mixer
from helexa.neuron.layers.gated_delta import GatedDeltaNet
from helexa.neuron.models.mixture_config import WithExperts
from helexa.neuron.models.qwen import WithImagePositions


class Qwen35(WithImagePositions):
    """Llama with Gated DeltaNet in most layers, and output gates in the others."""

    defaults: ClassVar = {"partial_rotary_factor": 0.25}
    types = ("full_attention", "linear_attention")
    recurrent = True
    capturable = False
    norm_offset = 1.0
    qk_norm = True
    gated = True
    sections = (11, 11, 10)

    def prepare(self) -> None:
        """Check that the model has full and linear attention, after `Llama.prepare`.

        Raises:
            ModelFileError: all layers have full attention, or all layers have linear attention.
        """
        super().prepare()
        if set(self.layer_types) != set(self.types):
            raise ModelFileError(
                f"config: 'layer_types' must contain both {self.types}, but all are {self.layer_types[0]!r}"
            )

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`: full attention at a fixed interval."""
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
    """Qwen3.5 with experts, and another row order, which `GatedDeltaNet` detects."""

    normalized = True
