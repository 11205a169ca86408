"""Granite 4: Granite with Mamba-2 in most layers, and with experts beside an MLP.

Reference: transformers `modeling_granitemoehybrid`.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.block import Mixer
from helexa.neuron.layers.mamba import UNLIMITED_STEPS, Mamba2
from helexa.neuron.layers.rope import Rope, no_rotation
from helexa.neuron.models.granite import GraniteMoe
from helexa.neuron.ops.state_space import ScanSizes

_OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
_CONV_BIAS = re.compile(r"model\.layers\.\d+\.mamba\.conv1d\.bias", re.ASCII)
_PROJECTION_BIAS = re.compile(r"model\.layers\.\d+\.mamba\.(?:in|out)_proj\.bias", re.ASCII)


class GraniteMoeHybrid(GraniteMoe):
    """Granite with Mamba-2 in layers of the type `linear_attention`."""

    defaults: ClassVar = {
        **GraniteMoe.defaults,
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "shared_intermediate_size": 1024,
    }
    supported: ClassVar = {
        "hidden_act": (None, "silu"),
        "position_embedding_type": (None, "nope", "rope"),
        "time_step_limit": UNLIMITED_STEPS,
    }
    types = ("full_attention", "linear_attention")
    recurrent = True
    capturable = False

    @classmethod
    def standard_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` with current layer types and the width of Mamba-2 heads."""
        standard = super().standard_config(config)
        types = standard.get("layer_types") or standard.get("layers_block_type")
        if types is not None:
            standard["layer_types"] = [_OLDER_TYPES.get(kind, kind) for kind in types]
        if standard["mamba_d_head"] == "auto":
            standard["mamba_d_head"] = standard["mamba_expand"] * standard["hidden_size"] // standard["mamba_n_heads"]
        return standard

    def prepare(self) -> None:
        """Check the layer types and the biases of Mamba-2, after `GraniteMoe.prepare`.

        Raises:
            ModelFileError: no layer has attention, or the checkpoint has other biases than the configuration.
        """
        super().prepare()
        if "full_attention" not in self.layer_types:
            raise ModelFileError("config: 'layer_types' must contain attention")
        self._require_stated_biases("mamba_conv_bias", _CONV_BIAS)
        self._require_stated_biases("mamba_proj_bias", _PROJECTION_BIAS)

    def layer_type(self, index: int) -> str:
        """Return Mamba-2, the type of all layers if the configuration lists none."""
        return "linear_attention"

    def ropes(self) -> Mapping[str, Rope]:
        """Return the rotary embedding of all layers, which may rotate nothing."""
        if self.settings.config.get("position_embedding_type") == "rope":
            return super().ropes()
        # Most of these models do not rotate queries and keys.
        return dict.fromkeys(self.types, no_rotation(self.settings.head_dim, self.loader.ops))

    def mixer(self, index: int, prefix: str) -> Mixer:
        """Return the mixer of layer `index`: attention or Mamba-2."""
        if self.layer_types[index] == "full_attention":
            return super().mixer(index, prefix)
        settings = self.settings
        sizes = ScanSizes(
            settings.positive("mamba_n_heads"),
            settings.positive("mamba_n_groups"),
            settings.positive("mamba_d_head"),
            settings.positive("mamba_d_state"),
            settings.positive("mamba_d_conv"),
        )
        return Mamba2(self.loader, f"{prefix}.mamba", hidden=settings.hidden, sizes=sizes, eps=settings.eps)
