"""Validation of a model's configuration, which is untrusted input."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from helexa.core.errors import ModelFileError, UnsupportedModelError

_LARGEST = 1 << 24  # numbers in the configuration must be smaller

SERVED_CONTEXT = "served_context"  # Key that the engine adds to a configuration: the option `context_length`

# Settings that most architectures do not implement, with the values that do not change the computation. `Decoder`
# rejects other values, because no tensor would show that a model uses the setting. None stands for a missing setting.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),  # a checkpoint reader that supports the quantization removes the setting
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None, 0),
    "attn_temperature_tuning": (None, False),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None, 0),
    "first_k_dense_replace": (None, 0),
    "is_causal": (None, True),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "n_group": (None, 1),
    "residual_multiplier": (None, 1),
    "routed_scaling_factor": (None, 1),
    "scale_emb": (None, 1),
    "scoring_func": (None, "softmax"),
    "topk_group": (None, 1),
    "use_bidirectional_attention": (None, False),
    "use_parallel_residual": (None, False),
}


class Settings:
    """A model's configuration; the constructor checks settings that all models have.

    Raises:
        ModelFileError: a setting is missing, invalid, or not supported (subclass UnsupportedModelError).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config  # the whole configuration, with the keys of Hugging Face's `config.json`
        self.hidden = self.positive("hidden_size")  # hidden size
        self.layers = self.positive("num_hidden_layers")  # number of decoder layers
        self.heads = self.positive("num_attention_heads")  # number of query heads
        # number of key heads, and of value heads; 1 in models with latent attention (`kv_lora_rank`)
        self.kv_heads = self.positive("num_key_value_heads", self.heads)
        # width of each head, as the KV cache stores it
        self.head_dim = self.positive("head_dim", self.hidden // self.heads)
        # The KV cache of latent attention has one head with the latent and the rotated key.
        if config.get("kv_lora_rank") is not None:
            self.kv_heads = 1
            self.head_dim = self.positive("kv_lora_rank") + self.positive("qk_rope_head_dim")
        self.eps = self.fraction("rms_norm_eps", 1e-6)  # epsilon of the RMS norms
        # number of positions that the model supports without dual chunk attention
        self.context = _context_of_plain_attention(
            config, _extended_context(config, self.positive("max_position_embeddings", 2048))
        )
        self.served_context = self.positive(SERVED_CONTEXT, self.context)
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(
                f"config: the number of attention heads is {self.heads}, expected a multiple of the number of KV "
                f"heads, {self.kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"config: the width of a head is {self.head_dim}, expected an even number")

    @property
    def intermediate(self) -> int:
        """The setting `intermediate_size`, which models without dense layers may omit."""
        return self.positive("intermediate_size")

    def positive(self, key: str, default: int | None = None) -> int:
        """Return the setting `key`, a positive integer; `default` if missing or null.

        Raises:
            ModelFileError: the setting is missing without a default, is not a positive integer, or is too large.
        """
        value = self.config.get(key)
        value = default if value is None else value
        # Not `isinstance`, because a bool is an int in Python.
        if type(value) is not int or not 0 < value < _LARGEST:
            raise ModelFileError(f"config: '{key}' is {value!r}, expected a whole number from 1 to {_LARGEST - 1}")
        return value

    def number(self, key: str) -> float:
        """Return the required setting `key`, a positive number.

        Raises:
            ModelFileError: the setting is missing, is not a positive number, or is too large.
        """
        value = self.config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
            raise ModelFileError(f"config: '{key}' is {value!r}, expected a positive number below {_LARGEST}")
        return float(value)

    def fraction(self, key: str, default: float) -> float:
        """Return the setting `key`, between 0 and 1 (exclusive), or `default`.

        Raises:
            ModelFileError: the number is not between 0 and 1 (exclusive).
        """
        value = self.config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise ModelFileError(f"config: '{key}' is {str(value)[:40]!r}, expected a number above 0 and below 1")
        return float(value)

    def soft_cap(self, key: str) -> float | None:
        """Return the setting `key`, a soft cap; None if it is missing, null or 0.

        Raises:
            ModelFileError: the setting is not a number, or is negative or too large.
        """
        return self.number(key) if self.config.get(key) else None

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        """Return the setting `key`, token ids below `vocab_size`; [] if missing.

        Raises:
            ModelFileError: the setting is not a list of token ids.
        """
        ids = self.config.get(key) or []
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise ModelFileError(
                f"config: '{key}' is {str(ids)[:80]}, expected a list of token ids from 0 to {vocab_size - 1}"
            )
        return ids

    def layer_types(self, known: Collection[str]) -> list[str] | None:
        """Return the setting `layer_types`, a list of names in `known`; None if missing.

        Raises:
            ModelFileError: not one type per layer; or a type is not in `known` (UnsupportedModelError).
        """
        types = self.config.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != self.layers:
            raise ModelFileError(
                f"config: 'layer_types' is {str(types)[:80]}, expected a list of {self.layers} types, one per layer"
            )
        for kind in types:
            if kind not in known:
                raise UnsupportedModelError(
                    f"config: 'layer_types' has {kind!r}; this architecture supports {', '.join(sorted(known))}"
                )
        return types

    def require(self, **supported: tuple[Any, ...]) -> None:
        """Check that each setting has a value in `supported` (None: missing or null).

        Raises:
            UnsupportedModelError: a setting has a value that is not implemented. The message names the setting.
        """
        for key, values in supported.items():
            value = self.config.get(key)
            if value not in values:
                raise UnsupportedModelError(f"config: '{key}' is {value!r}, supported: {', '.join(map(repr, values))}")


def _extended_context(config: Mapping[str, Any], stated: int) -> int:
    """Return `stated`, or the longer context (in positions) to which YaRN extends it."""
    # Model cards tell users to add YaRN to a configuration without changing `max_position_embeddings`. If this setting
    # is below `original_max_position_embeddings`, it limits the context and is not extended.
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if isinstance(rope, Mapping) and (rope.get("rope_type") or rope.get("type")) == "yarn":
            factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings")
            if not isinstance(factor, int | float) or not isinstance(trained, int):
                continue
            if 0 < trained <= stated < factor * trained < _LARGEST:
                return int(factor * trained)
    return stated


def _context_of_plain_attention(config: Mapping[str, Any], stated: int) -> int:
    """Return how many positions a model supports without dual chunk attention."""
    # Qwen2.5-1M and the long configurations of Qwen3-2507 state 1,010,000 positions, which they reach only with dual
    # chunk attention (An et al., 2024). Up to the trained length, ordinary attention computes the same result.
    chunks = config.get("dual_chunk_attention_config")
    trained = chunks.get("original_max_position_embeddings") if isinstance(chunks, Mapping) else None
    return min(stated, trained) if isinstance(trained, int) and trained > 0 else stated


@dataclass(frozen=True)
class TensorNames:
    """Settings of an architecture: the names of its modules in checkpoints."""

    embedding: str = "model.embed_tokens"  # name of the token embedding
    norm: str = "model.norm"  # name of the final norm
    # names, in a decoder layer, of the norms before the mixer and before the feed-forward layer; None without norms
    block_norms: tuple[str, str] | None = ("input_layernorm", "post_attention_layernorm")
    # names, in a decoder layer, of the norms after the mixer and after the feed-forward layer; None without norms
    post_norms: tuple[str, str] | None = None
    mlp: str = "mlp"  # name of the feed-forward layer in a decoder layer
    # names of the projections gate, up and down in the feed-forward layer
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    # names of the projections gate, up and down in an expert. The first name is None if experts have no gate.
    expert: tuple[str | None, str, str] = ("gate_proj", "up_proj", "down_proj")
    output: str = "o_proj"  # name of the output projection in attention
    # names of the norms of query heads and of key heads in attention
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
