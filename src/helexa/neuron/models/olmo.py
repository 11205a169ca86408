"""Models whose sublayers have norms on their outputs only: OLMo 2 and 3, EXAONE 4.

References: transformers `modeling_olmo2`, `modeling_olmo3`, `modeling_exaone4`.
"""

from collections.abc import Mapping
from typing import ClassVar

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron.layers.attention import QkNorms
from helexa.neuron.layers.rope import Rope, no_rotation
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.settings import TensorNames


class PostNormDecoder(Llama):
    """Llama with a norm of each sublayer's output instead of its input."""

    names = TensorNames(block_norms=None, post_norms=("post_attention_layernorm", "post_feedforward_layernorm"))


class Olmo2(PostNormDecoder):
    """OLMo 2: one norm over all query heads, and one over all key heads."""

    defaults: ClassVar = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}

    def qk_norms(self) -> QkNorms:
        """Return two norms: one over all query heads, one over all key heads."""
        return QkNorms(self.settings.eps, whole=True)


class Olmo3(Olmo2):
    """OLMo 2 with a sliding window in three of four layers."""

    defaults: ClassVar = {**Olmo2.defaults, "sliding_window": 4096}
    types = ("full_attention", "sliding_attention")

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`: every fourth layer has full attention."""
        return "sliding_attention" if (index + 1) % 4 else "full_attention"

    def ropes(self) -> Mapping[str, Rope]:
        """Return a rotary embedding for each layer type: full and sliding attention.

        Raises:
            UnsupportedModelError: `rope_parameters` has other keys than the layer types.
        """
        # In older configurations, the setting `rope_scaling` applies only to full-attention layers.
        config = self.settings.config
        parameters = config.get("rope_parameters") or {}
        if unknown := parameters.keys() - set(self.types):
            raise UnsupportedModelError(
                f"config: 'rope_parameters' has the key {min(unknown)!r}, expected only {', '.join(self.types)}"
            )
        base = {"rope_theta": config.get("rope_theta") or 500_000.0}
        # Rotary scaling applies to the layers with full attention only.
        full = {**base, **(parameters.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
        sliding = {**base, **(parameters.get("sliding_attention") or {})}
        return {
            "full_attention": self.rope({"rope_parameters": full}),
            "sliding_attention": self.rope({"rope_parameters": sliding}),
        }


class Exaone4(PostNormDecoder):
    """EXAONE 4: norms on query and key heads.

    If the model has a sliding window, the layers with full attention have no rotation (NoPE).
    """

    defaults: ClassVar = {
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    types = ("full_attention", "sliding_attention")
    qk_norm = True

    def prepare(self) -> None:
        """Call `Llama.prepare`, then create a rotary embedding without rotation."""
        super().prepare()
        self._no_rotation = no_rotation(self.settings.head_dim, self.loader.ops)

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`, from `sliding_window_pattern`.

        Raises:
            ModelFileError: `sliding_window_pattern` is neither a positive integer nor a string of the letters L and G.
        """
        settings = self.settings
        if settings.config["sliding_window"] is None:
            return "full_attention"
        pattern = settings.config["sliding_window_pattern"]
        # A string such as `LLLG` is repeated for all layers: L is sliding attention, and G is full attention. A number
        # n means that every n-th layer has full attention.
        if isinstance(pattern, str):
            if not pattern or not {*pattern} <= {"L", "G"}:
                raise ModelFileError(f"config: 'sliding_window_pattern' is {pattern!r}, expected letters L and G")
            return "sliding_attention" if pattern[index % len(pattern)] == "L" else "full_attention"
        return "sliding_attention" if (index + 1) % settings.positive("sliding_window_pattern") else "full_attention"

    def rope_of(self, index: int) -> Rope:
        """Return layer `index`'s rotary embedding; in a NoPE layer, it rotates nothing."""
        rotates = self.settings.config["sliding_window"] is None or self.layer_types[index] == "sliding_attention"
        return super().rope_of(index) if rotates else self._no_rotation
