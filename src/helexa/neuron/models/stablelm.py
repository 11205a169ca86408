"""StableLM: Llama with layer norms (reference: transformers `modeling_stablelm`)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.neuron.models.llama import Llama
from helexa.neuron.ops.operators import NormOp


class StableLm(Llama):
    """Llama with layer norms, which rotates a quarter of each head."""

    defaults: ClassVar = {"layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25}
    supported: ClassVar = {**Llama.supported, "qk_layernorm": (None, False)}

    @classmethod
    def standard_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` with the epsilon of the layer norms as `rms_norm_eps`."""
        standard = super().standard_config(config)
        return {**standard, "rms_norm_eps": standard["layer_norm_eps"]}

    def norm(self, name: str) -> NormOp:
        """Return the layer norm with the tensors `name.weight` and `name.bias`."""
        loader, width = self.loader, self.settings.hidden
        weight, bias = (loader.vector(f"{name}.{kind}", width) for kind in ("weight", "bias"))
        return loader.ops.layer_norm(weight, bias, self.settings.eps)
