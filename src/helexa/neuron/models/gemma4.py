"""Gemma 4, the text model (reference: transformers `modeling_gemma4`).

A layer's forward pass, for rows x [T, H] of a batch, with the residual stream x in float32:

    a = attention(rms_norm(x) * input_layernorm)          # scale 1; norms on query, key and value heads
    x = x + rms_norm(a) * post_attention_layernorm
    m = mlp(rms_norm(x) * pre_feedforward_layernorm)
    m = rms_norm(m) * post_feedforward_layernorm_1 + experts(x)      # only with experts beside the MLP
    x = x + rms_norm(m) * post_feedforward_layernorm
    p = gelu(x @ Wgate.T) * layer_inputs[layer]           # only with per-layer embeddings
    x = x + rms_norm(p @ Wprojection.T) * post_per_layer_input_norm
    x = x * layer_scalar
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron import tensors
from helexa.neuron.layers.attention import Attention, QkNorms
from helexa.neuron.layers.block import Block, GatedMlp, Mixer, Step
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.moe import ExpertReader
from helexa.neuron.layers.rope import Rope
from helexa.neuron.models.gemma3 import Gemma3
from helexa.neuron.models.settings import Settings
from helexa.neuron.ops.batch import AttentionShape, Batch
from helexa.neuron.ops.expert_routing_and_mixture import Routing
from helexa.neuron.ops.linear_and_norm_operators import NormOp
from helexa.neuron.tensors import Tensor

_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPES: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


class Gemma4(Gemma3):
    """Gemma 4: Gemma 3 with wider heads in full-attention layers, and optional parts.

    The optional parts are:

    * keys that are also values, in full-attention layers (`attention_k_eq_v`)
    * last layers that read the keys and values of earlier layers (`num_kv_shared_layers`), and whose MLPs may have
      twice the width (`use_double_wide_mlp`)
    * per-layer embeddings (`hidden_size_per_layer_input`)
    * experts beside the MLP (`enable_moe_block`)
    """

    defaults: ClassVar = {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
    }
    implemented = ("final_logit_softcapping",)
    supported: ClassVar = {
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        # With `vision`, each image token attends to all tokens of its image.
        "use_bidirectional_attention": (None, False, "vision"),
    }
    norm_offset = 0.0

    @classmethod
    def standard_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` with defaults and top-level settings for full-attention heads.

        Raises:
            UnsupportedModelError: `per_layer_config` has an unsupported setting, does not list exactly the
                full-attention layers, or does not have the same settings for all of them.
        """
        standard = super().standard_config(config)
        # The shape of full-attention layers is either in two settings at the top level, or in `per_layer_config`.
        by_layer = config.get("per_layer_config")
        if by_layer:
            types = config.get("layer_types") or []
            full = {str(index) for index, kind in enumerate(types) if kind == "full_attention"}
            shapes = [*by_layer.values()]
            if {*by_layer} != full or any(shape != shapes[0] for shape in shapes):
                raise UnsupportedModelError(
                    "config: 'per_layer_config' must have the same settings for all full-attention layers, and no "
                    "other layers"
                )
            if odd := shapes[0].keys() - {"head_dim", "num_key_value_heads"}:
                raise UnsupportedModelError(
                    f"config: 'per_layer_config' has {sorted(odd)[0]!r}, which is not supported"
                )
            standard["global_head_dim"] = shapes[0].get("head_dim", standard["head_dim"])
            standard["num_global_key_value_heads"] = shapes[0].get("num_key_value_heads")
        elif not standard.get("attention_k_eq_v"):
            standard["num_global_key_value_heads"] = None  # as in transformers, which ignores the setting here
        return standard

    def prepare(self) -> None:
        """Call `Gemma.prepare`; find layers that share keys; read per-layer embeddings.

        Raises:
            ModelFileError: the settings contradict each other, or this host loads only some layers of a model that has
                per-layer embeddings or shared keys. The error can also be the subclass UnsupportedModelError.
        """
        settings, loader = self.settings, self.loader
        self._shapes = {
            "sliding_attention": AttentionShape(settings.heads, settings.kv_heads, settings.head_dim),
            "full_attention": AttentionShape(
                settings.heads,
                settings.positive("num_global_key_value_heads", settings.kv_heads),
                settings.positive("global_head_dim"),
            ),
        }
        super().prepare()
        if self.layer_types[-1] != "full_attention":
            raise UnsupportedModelError(
                f"config: the last of 'layer_types' is {self.layer_types[-1]!r}, expected 'full_attention'"
            )
        shared = settings.positive("num_kv_shared_layers") if settings.config.get("num_kv_shared_layers") else 0
        self._first_shared = settings.layers - shared
        # For each layer type, the last layer with its own keys and values. Layers without their own read the cache of
        # this layer.
        self._sources = {kind: index for index, kind in enumerate(self.layer_types[: self._first_shared])}
        if missing := {*self.layer_types} - self._sources.keys():
            raise ModelFileError(
                f"config: 'num_kv_shared_layers' is {shared}, which leaves no layer of the type {min(missing)!r} whose "
                "keys and values could be shared"
            )
        without_kv = "|".join(str(index) for index in range(self._first_shared, settings.layers))
        # Checkpoints also contain key and value weights of layers without their own keys and values. These weights are
        # not used.
        if without_kv:
            names = r"self_attn\.(?:[kv]_proj|[kv]_norm)\.weight"
            self.unneeded = rf"model\.layers\.(?:{without_kv})\.{names}"
        width = settings.config.get("hidden_size_per_layer_input")
        self._layer_inputs = LayerInputs(loader, settings) if width else None
        padding = settings.config.get("pad_token_id")
        tokens = loader.vocab_size("model.embed_tokens")
        self._padding = padding if type(padding) is int and 0 <= padding < tokens else 0
        if not loader.stage.is_whole_model and (shared or width):
            raise ModelFileError(
                "models with per-layer embeddings or shared keys cannot be divided among hosts",
                advice="load the model on one host",
            )

    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """Return the shape of each layer type that occurs, without duplicates."""
        return tuple({self._shapes[kind] for kind in self.layer_types})

    def cache_layer(self, index: int) -> int:
        """Return the layer that owns the keys and values that layer `index` reads."""
        return index if index < self._first_shared else self._sources[self.layer_types[index]]

    def ropes(self) -> Mapping[str, Rope]:
        """Return a rotary embedding for each layer type."""
        config, loader = self.settings.config.get("rope_parameters") or _ROPES, self.loader
        if {*config} - {*_LAYER_TYPES}:
            raise ModelFileError(
                f"config: 'rope_parameters' has the keys {str([*config])[:80]}, expected only {_LAYER_TYPES}"
            )
        ropes: dict[str, Rope] = {}
        for kind in {*self.layer_types}:
            dim, name, factors = self._shapes[kind].dim, "rope_freqs.weight", None
            if kind == "full_attention" and name in loader:
                # In GGUF files, this tensor has the divisors of the rotary frequencies of full attention.
                factors = loader.vector(name, dim // 2)
            settings = self.rope_settings({"rope_parameters": config.get(kind)})
            ropes[kind] = Rope(settings, dim, loader.ops, trained_context=self.settings.context, factors=factors)
        return ropes

    def scale(self) -> float:
        """Return 1: the norm weights of query heads contain the scale."""
        return 1.0

    def mixer(self, index: int, prefix: str) -> Mixer:
        """Return the attention of layer `index`, in the shape of the layer's type."""
        kind = self.layer_types[index]
        heads, kv_heads, dim = self._shapes[kind]
        return Attention(
            self.loader,
            f"{prefix}.self_attn",
            hidden=self.settings.hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            rope=self.rope_of(index),
            scale=self.scale(),
            window=self.window(index),
            norms=QkNorms(self.settings.eps, self.norm_offset, values=True),
            causal=kind == "full_attention",
            keys_are_values=kind == "full_attention" and bool(self.settings.config.get("attention_k_eq_v")),
            shares_kv=index >= self._first_shared,
        )

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """Return the MLP of layer `index`; layers that share keys may be twice as wide."""
        settings = self.settings
        wide = settings.config.get("use_double_wide_mlp") and index >= self._first_shared
        width = settings.intermediate * (2 if wide else 1)
        return GatedMlp(self.loader, prefix, hidden=settings.hidden, intermediate=width, act=self.act)

    def block(self, index: int, prefix: str) -> Block:
        """Return the decoder layer `index`."""
        norms = (self.norm(f"{prefix}.input_layernorm"), self.norm(f"{prefix}.pre_feedforward_layernorm"))
        post_norms = (
            self.norm(f"{prefix}.post_attention_layernorm"),
            self.norm(f"{prefix}.post_feedforward_layernorm"),
        )
        has_experts = self.settings.config.get("enable_moe_block")
        scalar = f"{prefix}.layer_scalar"
        return Gemma4Block(
            self.loader,
            self.mixer(index, prefix),
            self.mlp(index, f"{prefix}.mlp"),
            norms,
            post_norms,
            experts=ParallelExperts(self.loader, prefix, self.settings, self.norm) if has_experts else None,
            gated_inputs=None
            if self._layer_inputs is None
            else GatedInputs(self.loader, prefix, index, self.settings, self.norm),
            factor=float(self.loader.plain(scalar, (1,))[0]) if scalar in self.loader else 1.0,
        )

    def layer_inputs(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """Return the per-layer embeddings of all layers; None if the model has none."""
        if self._layer_inputs is None:
            return None
        tokens = batch.tokens
        if batch.embeddings is not None:
            tokens = tokens.clone()
            tokens[batch.embedding_rows] = self._padding  # image tokens count as padding here, as in training
        return self._layer_inputs(tokens, hidden)


class LayerInputs:
    """Computes Gemma 4's per-layer embeddings of tokens, for all layers together.

    L is the number of layers, and P is the setting `hidden_size_per_layer_input`.
    """

    def __init__(self, loader: Loader, settings: Settings) -> None:
        self._ops = loader.ops
        self._width = settings.positive("hidden_size_per_layer_input")
        total = settings.layers * self._width
        self._embedding = loader.embedding("model.embed_tokens_per_layer", total)
        if self._embedding.vocab_size < loader.vocab_size("model.embed_tokens"):
            raise ModelFileError(
                f"tensor embed_tokens_per_layer has {self._embedding.vocab_size} tokens, fewer than the tensor "
                "embed_tokens"
            )
        self._projection = loader.replicated_linear("model.per_layer_model_projection", total, settings.hidden)
        # The result is (embedding * sqrt(P) + norm(projection / sqrt(H))) / sqrt(2). A larger epsilon of the norm
        # has the effect of the factor 1 / sqrt(H) on its input.
        factor = float(tensors.tensor(self._width**0.5, dtype=loader.ops.dtype))
        self._factor = factor * 0.5**0.5
        name, eps = "model.per_layer_projection_norm", settings.eps * settings.hidden
        self._norm = loader.norm(name, self._width, eps, factor=0.5**0.5)

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return per-layer embeddings [rows, L * P]; `hidden` is the first layer's input."""
        inputs = self._embedding(tokens, self._factor)
        projected = self._projection(hidden.to(self._ops.activation_dtype))
        normed = self._norm(projected.view(-1, self._width)).view(*inputs.shape)
        return self._ops.add_scaled(inputs, normed, 1.0)


class GatedInputs:
    """Gemma 4's sublayer for per-layer embeddings: gate, projection and norm."""

    def __init__(
        self, loader: Loader, prefix: str, index: int, settings: Settings, norm: Callable[[str], NormOp]
    ) -> None:
        width = settings.positive("hidden_size_per_layer_input")
        self._ops, self._first = loader.ops, index * width
        self._gate = loader.replicated_linear(f"{prefix}.per_layer_input_gate", width, settings.hidden)
        self._projection = loader.replicated_linear(f"{prefix}.per_layer_projection", settings.hidden, width)
        self._norm = norm(f"{prefix}.post_per_layer_input_norm")

    def __call__(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Return the sublayer's output [rows, hidden].

        Args:
            hidden: [rows, hidden], the residual stream.
            inputs: the result of `LayerInputs`.
        """
        gate = self._gate(hidden.to(self._ops.activation_dtype))
        gated = self._ops.gate_inputs(gate, inputs, self._first, Gemma4.act)
        return self._norm(self._projection(gated))


class ParallelExperts:
    """Gemma 4's experts beside the MLP; experts and MLP have separate norms."""

    def __init__(self, loader: Loader, prefix: str, settings: Settings, norm: Callable[[str], NormOp]) -> None:
        hidden, count = settings.hidden, settings.positive("num_experts")
        top_k = settings.positive("top_k_experts")
        if top_k > count:
            raise ModelFileError(f"config: 'top_k_experts' is {top_k}, but there are only {count} experts")
        self._after_mlp = norm(f"{prefix}.post_feedforward_layernorm_1")
        self._before, self._after = (norm(f"{prefix}.{name}_feedforward_layernorm_2") for name in ("pre", "post"))
        # The factor 1 / sqrt(H) of the router's input is part of the weight of its norm.
        scale = loader.vector(f"{prefix}.router.scale", hidden) * hidden**-0.5
        self._router_norm = loader.ops.rms_norm(scale, settings.eps)
        self._scores = loader.replicated_linear(f"{prefix}.router.proj", count, hidden)
        factors = loader.vector(f"{prefix}.router.per_expert_scale", count)
        routing = Routing(top_k, "normalized", factors=factors)
        reader = ExpertReader(loader, f"{prefix}.experts", count)
        self._experts = reader.mixture(routing, None, hidden, settings.positive("moe_intermediate_size"), Gemma4.act)
        self._ops = loader.ops

    def __call__(self, hidden: Tensor, mlp: Tensor) -> Tensor:
        """Return norm(`mlp`) + norm(outputs of the experts for `hidden`), [rows, hidden]."""
        experts = self._experts(self._before(hidden), self._scores(self._router_norm(hidden)))
        return self._ops.add(self._after(experts), self._after_mlp(mlp))


class Gemma4Block(Block):
    """A decoder layer of Gemma 4."""

    def __init__(
        self,
        loader: Loader,
        mixer: Mixer,
        mlp: Callable[[Tensor], Tensor],
        norms: tuple[NormOp, NormOp],
        post_norms: tuple[NormOp, NormOp],
        *,
        experts: ParallelExperts | None,
        gated_inputs: GatedInputs | None,
        factor: float,
    ) -> None:
        super().__init__(loader, mixer, mlp, norms, post_norms)
        self._after_mixer, self._after_mlp = post_norms
        self._experts = experts  # the experts beside the MLP; None without experts
        # the sublayer that reads the per-layer embeddings; None without per-layer embeddings
        self._gated_inputs = gated_inputs
        self._factor = factor  # factor by which the residual stream is multiplied at the end of the layer

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, cache: Any, step: Step, rows: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Return the residual stream after this layer, and None as delta (see `Block`)."""
        ops, inputs = self._ops, step.layer_inputs
        delta = self.mixer(self._mixer_norm(hidden, delta), cache, step, rows)
        if rows is not None:
            hidden = ops.choose_rows(hidden, rows)
            inputs = None if inputs is None else ops.choose_rows(inputs, rows)
        output = self._mlp(self._mlp_norm(hidden, self._after_mixer(delta)))
        if self._experts is not None:
            output = self._experts(hidden, output)
        output = self._after_mlp(output)
        if self._gated_inputs is not None and inputs is not None:
            hidden = ops.add_scaled(hidden, output, 1.0)
            output = self._gated_inputs(hidden, inputs)
        return ops.add_scaled(hidden, output, self._factor), None
