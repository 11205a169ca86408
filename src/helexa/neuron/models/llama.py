"""Llama, the base class of all other architectures in this package (reference: transformers `modeling_llama`)."""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.attention import Attention
from helexa.neuron.layers.block import Block
from helexa.neuron.layers.mixer import Mixer
from helexa.neuron.layers.mlp import GatedMlp
from helexa.neuron.layers.rope import Rope, rope_settings
from helexa.neuron.models.decoder import Decoder

_ATTENTION_BIAS = re.compile(r"model\.layers\.\d+\.self_attn\.[qkvo]_proj\.bias", re.ASCII)
_MLP_BIAS = re.compile(r"model\.layers\.\d+\.mlp\.(?:gate|up|down)_proj\.bias", re.ASCII)


class Llama(Decoder):
    """A model with RMS norms, rotary grouped-query attention and gated MLPs. The residual stream is float32.

    Attributes:
        layer_types: type of each layer, one of `types`.
    """

    supported: ClassVar = {"hidden_act": (None, "silu")}

    types: ClassVar[tuple[str, ...]] = ("full_attention",)
    """The layer types that the architecture supports, with their names in `layer_types` of `config.json`."""
    qk_norm: ClassVar[bool] = False
    """Whether an RMS norm is applied to each query and key head before rotation."""
    sinks: ClassVar[bool] = False
    """Whether each attention head has an attention sink (see `Attention`)."""
    gated: ClassVar[bool] = False
    """Whether the output of each attention head is multiplied by the sigmoid of a gate (see `Attention`)."""
    act: ClassVar[str] = "silu"
    """Activation of the feed-forward layers (see `GatedMlp`)."""

    def prepare(self) -> None:
        """Determine the type of each layer, and create the rotary embedding of each layer type."""
        settings = self.settings
        layer_types = settings.layer_types(self.types)
        self.layer_types = layer_types or [self.layer_type(index) for index in range(settings.layers)]
        self._ropes = self.ropes()
        self._require_stated_biases("attention_bias", _ATTENTION_BIAS)
        self._require_stated_biases("mlp_bias", _MLP_BIAS)

    def _require_stated_biases(self, setting: str, names: re.Pattern[str]) -> None:
        """Check that the checkpoint has biases if and only if `setting` is true. A missing setting allows both."""
        stated = self.settings.config.get(setting)
        if stated is None:
            return
        bias = next((name for name in self.loader.checkpoint.names() if names.fullmatch(name)), None)
        if bool(stated) != (bias is not None):
            found = f"the model has the tensor {bias}" if bias else "the model has no tensors of these biases"
            raise ModelFileError(
                f"config: '{setting}' is {stated!r}, but {found}: the configuration or the file is wrong"
            )

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`: full attention in Llama, and other types in subclasses.

        The method is only called if the configuration does not list `layer_types`.
        """
        return "full_attention"

    def ropes(self) -> Mapping[str, Rope]:
        """Return the rotary embedding of each layer type. In Llama, all layer types share one rotary embedding."""
        return dict.fromkeys(self.types, self.rope(self.settings.config))

    def rope(self, config: Mapping[str, Any]) -> Rope:
        """Return the rotary embedding for the rotary settings in `config` (see `rope_settings`).

        If the checkpoint has a tensor `rope_freqs.weight`, the rotary frequencies are divided by its numbers.
        """
        settings, loader = self.settings, self.loader
        name = "rope_freqs.weight"
        factors = loader.vector(name, settings.head_dim // 2) if name in loader else None
        rope = self.rope_settings(config)
        return Rope(rope, settings.head_dim, loader.ops, trained_context=settings.context, factors=factors)

    def rope_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings in `config` (see `layers.rope.rope_settings`)."""
        return rope_settings(config)

    def block(self, index: int, prefix: str) -> Block:
        """Read and return the decoder layer `index`: the mixer, such as attention, and the feed-forward layer."""
        norms = (self.norm(f"{prefix}.input_layernorm"), self.norm(f"{prefix}.post_attention_layernorm"))
        return Block(self.loader, self.mixer(index, prefix), self.mlp(index, f"{prefix}.mlp"), norms)

    def mixer(self, index: int, prefix: str) -> Mixer:
        """Read and return the mixer of layer `index`: attention in Llama, another layer in some subclasses."""
        settings = self.settings
        return Attention(
            self.loader,
            f"{prefix}.self_attn",
            hidden=settings.hidden,
            heads=settings.heads,
            kv_heads=settings.kv_heads,
            head_dim=settings.head_dim,
            rope=self._ropes[self.layer_types[index]],
            scale=self.scale(),
            window=self.window(index),
            sinks=self.sinks,
            norms=(settings.eps, self.norm_offset) if self.qk_norm else None,
            gated=self.gated,
        )

    def scale(self) -> float | None:
        """Return the factor on the products of queries and keys in attention; None means 1 / sqrt(head_dim)."""
        return None

    def window(self, index: int) -> int | None:
        """Return the sliding window of layer `index` in positions; None if the layer has full attention."""
        sliding = self.layer_types[index] == "sliding_attention"
        return self.settings.positive("sliding_window") if sliding else None

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """Read and return the feed-forward layer of decoder layer `index`. Its tensor names start with `prefix`."""
        settings = self.settings
        return GatedMlp(self.loader, prefix, hidden=settings.hidden, intermediate=settings.intermediate, act=self.act)
