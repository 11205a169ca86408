"""Validation of a model's configuration, which is untrusted input."""

from collections.abc import Collection, Mapping
from typing import Any

from helexa.core.errors import ModelFileError

_LARGEST = 1 << 24

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
"""Values that do not change the computation, of settings that no architecture here implements.

Some models have these settings without any tensor that would show their use. None stands for a missing setting.
"""


class Settings:
    """The configuration of a model. The constructor checks the settings that all architectures have.

    Attributes:
        config: the whole configuration, with the keys of Hugging Face's `config.json`.
        hidden: hidden size.
        layers: number of decoder layers.
        heads: number of query heads.
        kv_heads: number of key heads, and of value heads.
        head_dim: width of each head.
        eps: epsilon of the RMS norms.
        context: number of positions that the model was trained for.

    Raises:
        ModelFileError: a setting is missing or invalid; the message names the setting.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.hidden = self.positive("hidden_size")
        self.layers = self.positive("num_hidden_layers")
        self.heads = self.positive("num_attention_heads")
        self.kv_heads = self.positive("num_key_value_heads", self.heads)
        self.head_dim = self.positive("head_dim", self.hidden // self.heads)
        self.eps = self.fraction("rms_norm_eps", 1e-6)
        self.context = self.positive("max_position_embeddings", 2048)
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ModelFileError(
                f"{self.heads} heads of {self.head_dim} over {self.kv_heads} KV heads are not supported"
            )

    @property
    def intermediate(self) -> int:
        """The setting `intermediate_size`, the intermediate size of a dense feed-forward layer.

        Raises:
            ModelFileError: the setting is missing or invalid. Models with experts in all layers may omit the setting.
        """
        return self.positive("intermediate_size")

    def positive(self, key: str, default: int | None = None) -> int:
        """Return the setting `key`, a positive integer.

        Args:
            default: value to use if the setting is missing; None if the setting is required.

        Raises:
            ModelFileError: the setting is required but missing, is not a positive integer, or is too large.
        """
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < _LARGEST:
            raise ModelFileError(f"config: '{key}' is {value!r}, expected a positive number")
        return value

    def number(self, key: str) -> float:
        """Return the required setting `key`, a positive number.

        Raises:
            ModelFileError: the number is not positive or is too large.
        """
        value = float(self.config[key])
        if not 0 < value < _LARGEST:
            raise ModelFileError(f"config: '{key}' is {value}, expected a positive number")
        return value

    def fraction(self, key: str, default: float) -> float:
        """Return the setting `key`, a number between 0 and 1 (exclusive), or `default` if the setting is missing.

        Raises:
            ModelFileError: the number is not between 0 and 1 (exclusive).
        """
        value = float(self.config.get(key, default))
        if not 0 < value < 1:
            raise ModelFileError(f"config: '{key}' is {value}, expected a small positive number")
        return value

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        """Return the setting `key`, a list of token ids below `vocab_size`; [] if the setting is missing.

        Raises:
            ModelFileError: the setting is not a list of token ids.
        """
        ids = self.config.get(key) or []
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise ModelFileError(f"config: '{key}' is not a list of token ids below {vocab_size}")
        return ids

    def layer_types(self, known: Collection[str]) -> list[str] | None:
        """Return the setting `layer_types`, the type of each layer; None if the configuration lacks this setting.

        Args:
            known: layer types that the architecture supports.

        Raises:
            ModelFileError: the list does not have one type per layer, or it contains a type that is not in `known`.
        """
        types = self.config.get("layer_types")
        if types is None:
            return None
        if not isinstance(types, list) or len(types) != self.layers:
            raise ModelFileError(f"config: 'layer_types' must list {self.layers} types, one per layer")
        for kind in types:
            if kind not in known:
                raise ModelFileError(f"config: 'layer_types' has {kind!r}, which this architecture does not support")
        return types

    def require(self, **supported: tuple[Any, ...]) -> None:
        """Check that each setting in `supported` has one of its implemented values.

        Args:
            supported: for each setting, the values that are implemented. None stands for a missing setting.

        Raises:
            ModelFileError: a setting has a value that is not implemented. The message names the setting.
        """
        for key, values in supported.items():
            value = self.config.get(key)
            if value not in values:
                raise ModelFileError(f"config: '{key}' is {value!r}, supported: {', '.join(map(repr, values))}")
