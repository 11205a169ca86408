"""A GGUF header in the terms of Hugging Face's `config.json`, without torch."""

import math
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf import GgufFile

# Architectures whose name differs from the `model_type`; all others are the same word.
_MODEL_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}

# config.json key -> metadata key below the architecture's prefix
_REQUIRED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_TOKENS = {"bos_token_id": "tokenizer.ggml.bos_token_id", "eos_token_id": "tokenizer.ggml.eos_token_id"}


_LARGEST = 2**31 - 1


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The model's configuration.

    Keys: model_type, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
    head_dim, rms_norm_eps, rope_theta, rope_scaling, max_position_embeddings, vocab_size, tie_word_embeddings,
    attention_bias, hidden_act, and where the file has them bos_token_id, eos_token_id, sliding_window,
    partial_rotary_factor, num_experts, num_experts_per_tok, moe_intermediate_size.

    Raises:
        ModelFileError: naming a key that is missing or of the wrong kind.
    """
    return _Metadata(file).config()


class _Metadata:
    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._prefix = file.architecture

    def config(self) -> dict[str, Any]:
        tensors = self._file.tensors
        config: dict[str, Any] = {"model_type": _MODEL_TYPES.get(self._prefix, self._prefix)}
        for name, key in _REQUIRED.items():
            config[name] = self._integer(self._key(key))
        for name, key in _OPTIONAL.items():
            if self._key(key) in self._file.metadata:
                config[name] = self._integer(self._key(key))
        for name, key in _TOKENS.items():
            if key in self._file.metadata:
                config[name] = self._integer(key, least=0)
        heads = config["num_attention_heads"]
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", config["hidden_size"] // heads)
        if not config["head_dim"]:
            raise self._wrong(self._key("attention.head_count"), "is larger than the hidden size")
        # A model is built from this number before its tensors are looked up.
        if config["num_hidden_layers"] > len(tensors):
            raise self._wrong(self._key("block_count"), f"is larger than the file's {len(tensors)} tensors can fill")
        config["rms_norm_eps"] = self._number(self._key("attention.layer_norm_rms_epsilon"))
        config["rope_theta"] = self._number(self._key("rope.freq_base"), default=10_000.0)
        config["rope_scaling"] = self._rope_scaling()
        rotated = self._key("rope.dimension_count")
        if self._file.metadata.get(rotated, config["head_dim"]) != config["head_dim"]:
            config["partial_rotary_factor"] = self._integer(rotated) / config["head_dim"]
        config["vocab_size"] = self._vocab_size()
        config["tie_word_embeddings"] = "output.weight" not in tensors
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["hidden_act"] = "silu"
        return config

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._file.metadata.get(self._key("rope.scaling.type"), "none")
        if kind == "none":
            return None
        if not isinstance(kind, str):
            raise self._wrong(self._key("rope.scaling.type"), "is not a name")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._number(self._key("rope.scaling.factor"))}
        original = self._key("rope.scaling.original_context_length")
        if original in self._file.metadata:
            scaling["original_max_position_embeddings"] = self._integer(original)
        for name in ("beta_fast", "beta_slow"):
            key = self._key(f"rope.scaling.yarn_{name}")
            if key in self._file.metadata:
                scaling[name] = self._number(key)
        return scaling

    def _vocab_size(self) -> int:
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is not None:
            return embedding.shape[0]
        return self._integer(self._key("vocab_size"))

    def _key(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def _integer(self, key: str, least: int = 1) -> int:
        value = self._value(key)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # stated per layer, the same for each
        if type(value) is not int or not least <= value <= _LARGEST:
            raise ModelFileError(
                f"{self._file.path.name}: key {key} is not one whole number from {least} to {_LARGEST}"
            )
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key) if default is None else self._file.metadata.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, "is not a positive number")
        return float(value)

    def _value(self, key: str) -> Any:
        if key not in self._file.metadata:
            raise self._wrong(key, "is missing")
        return self._file.metadata[key]

    def _wrong(self, key: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._file.path.name}: key {key} {problem}")
