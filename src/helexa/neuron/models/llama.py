"""Llama: the plain pre-norm decoder that most others vary (reference: transformers `modeling_llama`)."""

from typing import Any

from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.batch import Batch
from helexa.neuron.layers.attention import Attention, Step
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.mlp import GatedMlp
from helexa.neuron.layers.rope import Rope


class Llama:
    """RMS norm, rotary grouped-query attention, RMS norm, gated MLP; residuals in float32.

    Attributes:
        heads, kv_heads, head_dim, layers: the shape of attention and of the KV cache.
        vocab_size: width of the logits.
    """

    qk_norm = False

    def __init__(self, config: dict[str, Any], loader: Loader) -> None:
        _refuse_unsupported(config)
        self._ops = loader.ops
        hidden = _positive(config, "hidden_size")
        self.heads = heads = _positive(config, "num_attention_heads")
        self.kv_heads = _positive(config, "num_key_value_heads", heads)
        self.head_dim = _positive(config, "head_dim", hidden // heads)
        if heads % self.kv_heads or self.head_dim % 2:
            raise ModelFileError(f"{heads} heads of {self.head_dim} over {self.kv_heads} KV heads do not make a model")
        intermediate = _positive(config, "intermediate_size")
        eps = float(config.get("rms_norm_eps", 1e-6))
        if not 0 < eps < 1:
            raise ModelFileError(f"config: 'rms_norm_eps' is {eps}, expected a small positive number")
        factors = loader.vector("rope_freqs.weight", self.head_dim // 2) if "rope_freqs.weight" in loader else None
        self._rope = Rope(config, self.head_dim, loader.ops, factors)
        self._embed = loader.embedding("model.embed_tokens", hidden)
        self.layers = [
            Block(loader, f"model.layers.{index}", self, hidden, heads, intermediate, eps)
            for index in range(_positive(config, "num_hidden_layers"))
        ]
        self.vocab_size = self._embed.vocab_size
        self._norm = loader.norm("model.norm", hidden, eps)
        tied = config.get("tie_word_embeddings", False) or "lm_head.weight" not in loader
        head = {"lm_head": self.vocab_size}
        self._head = self._ops.linear([self._embed.matrix], None) if tied else loader.linear(head, hidden)

    def forward(self, batch: Batch, caches: list[Tensor]) -> Tensor:
        """Logits [S, vocabulary] of the rows that sample; K and V of all rows go to `caches`, one per layer."""
        step = Step(batch, self._rope.tables(batch.positions))
        hidden, delta = self._embed(batch.tokens), None
        for layer, cache in zip(self.layers[:-1], caches[:-1], strict=True):
            hidden, delta = layer(hidden, delta, cache, step)
        # Of the last layer only K and V are needed of rows that do not sample.
        hidden, delta = self.layers[-1](hidden, delta, caches[-1], step, batch.sample_rows)
        return self._head(self._norm(hidden, delta))


class Block:
    """One decoder layer."""

    def __init__(
        self, loader: Loader, prefix: str, model: Llama, hidden: int, heads: int, intermediate: int, eps: float
    ) -> None:
        self._ops = loader.ops
        self._input_norm = loader.norm(f"{prefix}.input_layernorm", hidden, eps)
        self._attention = Attention(
            loader,
            f"{prefix}.self_attn",
            hidden=hidden,
            heads=heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            qk_norm_eps=eps if model.qk_norm else None,
        )
        self._mlp_norm = loader.norm(f"{prefix}.post_attention_layernorm", hidden, eps)
        self._mlp = GatedMlp(loader, f"{prefix}.mlp", hidden=hidden, intermediate=intermediate)

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, cache: Tensor, step: Step, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add `delta` to the residual stream [T, H] in place; return the stream and what this layer would add next.

        Args:
            rows: [S] rows that are wanted; None for all.
        """
        delta = self._attention(self._input_norm(hidden, delta), cache, step, rows)
        if rows is not None:
            hidden = self._ops.choose_rows(hidden, rows)
        return hidden, self._mlp(self._mlp_norm(hidden, delta))


def _refuse_unsupported(config: dict[str, Any]) -> None:
    """What would load but compute something else is refused by name.

    Raises:
        ModelFileError: names the setting.
    """
    rope = config.get("rope_parameters") or {}
    expected = {
        "hidden_act": (config.get("hidden_act"), (None, "silu")),
        "quantization_config": (config.get("quantization_config"), (None,)),
        "partial_rotary_factor": (
            config.get("partial_rotary_factor", rope.get("partial_rotary_factor")),
            (None, 1, 1.0),
        ),
        "use_sliding_window": (config.get("use_sliding_window"), (None, False)),
    }
    for key, (value, supported) in expected.items():
        if value not in supported:
            raise ModelFileError(f"'{key}' of this model is {value!r}, which its architecture here does not support")


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or not 0 < value < 1 << 24:
        raise ModelFileError(f"config: '{key}' is {value!r}, expected a positive number")
    return value
