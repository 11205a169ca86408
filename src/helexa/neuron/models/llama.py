"""Llama, the base class of all other architectures.

A layer's forward pass, for rows x [T, H] of a batch, with the residual stream x in float32:

    h = rms_norm(x) * input_layernorm
    q, k, v = h @ Wq.T, h @ Wk.T, h @ Wv.T        # column-parallel: each rank has its own heads
    q, k = rms_norm(q), rms_norm(k)               # only with `qk_norm`
    q, k = rotate(q, position), rotate(k, position)
    cache[page, slot] = k, v
    a = softmax(scale * q @ cache_k.T + mask) @ cache_v
    x = x + a @ Wo.T                              # row-parallel if `tensor_parallel_mode` is `sum`: ranks add results
    h = rms_norm(x) * post_attention_layernorm
    g, u = h @ Wgate.T, h @ Wup.T                 # column-parallel
    x = x + (act(g) * u) @ Wdown.T                # row-parallel if `tensor_parallel_mode` is `sum`

`llama_variants.py` has the architectures that differ from Llama in a few lines. Reference: transformers
`modeling_llama`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.attention import Attention, QkNorms
from helexa.neuron.layers.block import Block, GatedMlp, Mixer, SublayerBlock
from helexa.neuron.layers.rope import Rope, rope_settings
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.ops.linear_and_norm_operators import NormOp, QueryTemperature
from helexa.neuron.tensors import Tensor

ATTENTION_BIAS = re.compile(r"model\.layers\.\d+\.self_attn\.[qkvo]_proj\.bias", re.ASCII)
_MLP_BIAS = re.compile(r"model\.layers\.\d+\.mlp\.(?:gate|up|down)_proj\.bias", re.ASCII)


class Llama(Decoder):
    """A model with RMS norms, rotary grouped-query attention and gated MLPs.

    Attributes:
        layer_types: type of each layer, one of `types`.
    """

    supported: ClassVar = {"hidden_act": (None, "silu")}

    # The layer types that the architecture supports, with their names in `layer_types` of `config.json`.
    types: ClassVar[tuple[str, ...]] = ("full_attention",)
    qk_norm: ClassVar[bool] = False  # Whether an RMS norm is applied to each query and key head before rotation
    # Whether the rotary embedding rotates adjacent numbers of a head (see `Attention`).
    interleaved: ClassVar[bool] = False
    gate: ClassVar[str | None] = None  # name of a projection to gates on the attention's output (see `Attention`)
    # Whether the output of each attention head is multiplied by the sigmoid of a gate (see `Attention`).
    gated: ClassVar[bool] = False
    act: ClassVar[str] = "silu"  # Activation of the feed-forward layers (see `GatedMlp`)

    def prepare(self) -> None:
        """Determine each layer's type, and create a rotary embedding per type."""
        settings = self.settings
        layer_types = settings.layer_types(self.types)
        self.layer_types = layer_types or [self.layer_type(index) for index in range(settings.layers)]
        self._ropes = self.ropes()
        self._require_stated_biases("attention_bias", ATTENTION_BIAS)
        self._require_stated_biases("mlp_bias", _MLP_BIAS)

    def _require_stated_biases(self, setting: str, names: re.Pattern[str]) -> None:
        """If `setting` is stated, check that it is true exactly if `names` matches a bias."""
        stated = self.settings.config.get(setting)
        # Without the setting, the loader reads biases if the checkpoint has them.
        if stated is None:
            return
        bias = next((name for name in self.loader.checkpoint.names() if names.fullmatch(name)), None)
        if bool(stated) != (bias is not None):
            found = f"the model has the tensor {bias}" if bias else "the model has no tensors of these biases"
            raise ModelFileError(
                f"config: '{setting}' is {stated!r}, but {found}: the configuration or the file is wrong"
            )

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`, for configurations without `layer_types`."""
        return "full_attention"

    def ropes(self) -> Mapping[str, Rope]:
        """Return the rotary embedding of each layer type: in Llama, the same for all."""
        return dict.fromkeys(self.types, self.rope(self.settings.config))

    def rope(self, config: Mapping[str, Any]) -> Rope:
        """Return the rotary embedding for `config` (see `rope_settings`)."""
        settings, loader = self.settings, self.loader
        # GGUF files of Llama 3.1 have this tensor instead of settings. It has the divisors of the rotary frequencies.
        name = "rope_freqs.weight"
        factors = loader.vector(name, settings.head_dim // 2) if name in loader else None
        rope = self.rope_settings(config)
        context = {"trained_context": settings.context, "served_context": settings.served_context}
        return Rope(rope, settings.head_dim, loader.ops, **context, factors=factors)

    def rope_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings in `config` (see `layers.rope.rope_settings`)."""
        return rope_settings(config)

    def block(self, index: int, prefix: str) -> Block | SublayerBlock:
        """Return the decoder layer `index`: mixer, feed-forward layer and norms."""
        norms, post_norms = (self._norms(prefix, names) for names in (self.names.block_norms, self.names.post_norms))
        if norms is None:
            without = self.loader.ops.without_norm()
            norms = (without, without)
        mixer, mlp = self.mixer(index, prefix), self.mlp(index, f"{prefix}.{self.names.mlp}")
        return Block(self.loader, mixer, mlp, norms, post_norms)

    def _norms(self, prefix: str, names: tuple[str, str] | None) -> tuple[NormOp, NormOp] | None:
        return None if names is None else (self.norm(f"{prefix}.{names[0]}"), self.norm(f"{prefix}.{names[1]}"))

    def mixer(self, index: int, prefix: str) -> Mixer:
        """Return the mixer of layer `index`: attention in Llama."""
        settings = self.settings
        return Attention(
            self.loader,
            f"{prefix}.self_attn",
            hidden=settings.hidden,
            heads=settings.heads,
            kv_heads=settings.kv_heads,
            head_dim=settings.head_dim,
            rope=self.rope_of(index),
            scale=self.scale(),
            window=self.window(index),
            sinks=self.sinks,
            cap=self.settings.soft_cap("attn_logit_softcapping"),
            norms=self.qk_norms(),
            temperature=self.temperature(),
            interleaved=self.interleaved,
            gated=self.gated,
            gate=self.gate,
            output=self.names.output,
        )

    def qk_norms(self) -> QkNorms | None:
        """Return the norms of queries and keys; None without norms."""
        return QkNorms(self.settings.eps, self.norm_offset, self.names.head_norms) if self.qk_norm else None

    def temperature(self) -> QueryTemperature | None:
        """Return the position-dependent factor of the queries; None without a factor."""
        return None

    def rope_of(self, index: int) -> Rope:
        """Return the rotary embedding of layer `index`, by the layer's type."""
        return self._ropes[self.layer_types[index]]

    def scale(self) -> float | None:
        """Return the attention scale; None means 1 / sqrt(head_dim)."""
        return None

    def window(self, index: int) -> int | None:
        """Return the sliding window of layer `index` in positions; None without one."""
        sliding = self.layer_types[index] == "sliding_attention"
        return self.settings.positive("sliding_window") if sliding else None

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """Read and return the MLP of layer `index`; `prefix` begins its tensor names."""
        settings = self.settings
        width, names = settings.intermediate, self.names.projections
        return GatedMlp(self.loader, prefix, hidden=settings.hidden, intermediate=width, act=self.act, names=names)
