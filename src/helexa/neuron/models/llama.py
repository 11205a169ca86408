"""Llama: the plain pre-norm decoder that most others vary (reference: transformers `modeling_llama`)."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from helexa.neuron.layers.attention import Attention
from helexa.neuron.layers.block import Block
from helexa.neuron.layers.mixer import Mixer
from helexa.neuron.layers.mlp import GatedMlp
from helexa.neuron.layers.rope import Rope, rope_settings
from helexa.neuron.models.decoder import Decoder


class Llama(Decoder):
    """RMS norm, rotary grouped-query attention, RMS norm, gated MLP; residuals in float32."""

    qk_norm: ClassVar[bool] = False
    """Each query and key head passes a norm before it is rotated."""
    sinks: ClassVar[bool] = False
    """Each head has a sink (see `Attention`)."""
    gated: ClassVar[bool] = False
    """What each head finds passes a gate (see `Attention`)."""
    rotated: ClassVar[float] = 1.0
    """Share of each head that is rotated where the configuration does not say it."""

    def prepare(self) -> None:
        """One rotation for all layers."""
        settings, loader = self.settings, self.loader
        settings.require(hidden_act=(None, "silu"))
        name, rotated = "rope_freqs.weight", settings.head_dim // 2
        self.rope = Rope(
            rope_settings({"partial_rotary_factor": self.rotated, **settings.config}),
            settings.head_dim,
            loader.ops,
            trained_context=settings.positive("max_position_embeddings", 2048),
            factors=loader.vector(name, rotated) if name in loader else None,
        )

    def block(self, index: int, prefix: str) -> Block:
        """See `Decoder`."""
        norms = (self.norm(f"{prefix}.input_layernorm"), self.norm(f"{prefix}.post_attention_layernorm"))
        return Block(self.loader, self.mixer(index, prefix), self.mlp(index, f"{prefix}.mlp"), norms)

    def mixer(self, index: int, prefix: str) -> Mixer:
        """What lets the positions of layer `index` see one another."""
        settings = self.settings
        return Attention(
            self.loader,
            f"{prefix}.self_attn",
            hidden=settings.hidden,
            heads=settings.heads,
            kv_heads=settings.kv_heads,
            head_dim=settings.head_dim,
            rope=self.rope,
            window=self.window(index),
            sinks=self.sinks,
            norms=(settings.eps, self.norm_offset) if self.qk_norm else None,
            gated=self.gated,
        )

    def window(self, index: int) -> int | None:
        """Positions that a query of layer `index` sees; None for all."""
        return None

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """The feed-forward layer at `index`."""
        return GatedMlp(self.loader, prefix, hidden=self.settings.hidden, intermediate=self.settings.intermediate)
