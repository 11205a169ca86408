"""Qwen3.5 (dense), text model, with Gated DeltaNets in three of four layers.

Reference: transformers `modeling_qwen3_5`.
"""

from typing import ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.gated_delta import GatedDeltaNet
from helexa.neuron.layers.mixer import Mixer
from helexa.neuron.models.qwen_vl import WithImagePositions


class Qwen35(WithImagePositions):
    """Llama with Gated DeltaNet in most layers. The attention layers have output gates.

    By default, the rotary embedding rotates only the first quarter of each attention head.
    """

    defaults: ClassVar = {"partial_rotary_factor": 0.25}
    types = ("full_attention", "linear_attention")
    recurrent = True
    capturable = False
    norm_offset = 1.0
    qk_norm = True
    gated = True
    sections = (11, 11, 10)

    def prepare(self) -> None:
        """Check that the model has layers with full and with linear attention, after the work of `Llama.prepare`.

        Raises:
            ModelFileError: all layers have full attention, or all layers have linear attention.
        """
        super().prepare()
        if set(self.layer_types) != set(self.types):
            raise ModelFileError(
                f"config: 'layer_types' must contain both {self.types}, but all are {self.layer_types[0]!r}"
            )

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`: full attention for every `full_attention_interval`-th layer.

        The other layers have linear attention (Gated DeltaNet).
        """
        interval = self.settings.positive("full_attention_interval", 4)
        return "linear_attention" if (index + 1) % interval else "full_attention"

    def mixer(self, index: int, prefix: str) -> Mixer:
        """Read and return the mixer of layer `index`: attention with output gates, or Gated DeltaNet."""
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
