"""Convert the metadata of a GGUF header to Hugging Face's `config.json`.

This module does not import torch. The meaning of each key follows llama.cpp's converters (`conversion/`). The keys that
only some architectures have are read in `architecture_settings.py`.
"""

import math
from typing import Any

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron.weights.gguf.architecture_settings import FAMILIES
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.header_and_metadata_reader import is_list_of
from helexa.neuron.weights.gguf.typed_metadata_and_token_types import Metadata, suppressed_tokens

_GRANITE = frozenset(["granite", "granitehybrid", "granitemoe", "granite_swa"])

_NEMOTRON = frozenset(["nemotron_h", "nemotron_h_moe"])

# Architectures whose rows of q and k are interleaved in pairs, for a rotary embedding that rotates the whole head. The
# converter of Nemotron-H interleaves the rows, too, although the model has no rotary embedding.
INTERLEAVED = frozenset(["arcee", "llama", "mistral3", "muse-glimmer", "smollm3", *_GRANITE, *_NEMOTRON])

_LATENT = frozenset(["deepseek2"])  # Architectures with latent attention, whose values have another width than the keys

# Architectures whose layers with a sliding window have other heads than the layers with full attention.
_TWO_SHAPES = frozenset(["gemma4"])

# Architectures in which layers without attention may have 0 KV heads. Among Qwen's files, only those of Ollama's
# converter have 0.
_WITHOUT_ATTENTION = frozenset(["granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"])
_WITHOUT_ATTENTION |= {"qwen3next", "qwen35", "qwen35moe"}

_ATTENTION_BIASES = (".attn_q.bias", ".attn_k.bias", ".attn_v.bias", ".attn_output.bias")

# Architectures whose files may have an epsilon only at the key of LayerNorm, as in llama.cpp.
_LAYER_NORM_EPSILON = frozenset(["cohere2", "command-r", "stablelm", *_NEMOTRON])

# Keys of llama.cpp that are not read, or are read only for some architectures, with the values that do not change the
# computation. In llama.cpp, the value 0 disables a scale.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1, 3),  # 0: default; 1: softmax over all experts; 3: over the selected experts
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "ssm.v_head_reordered": (True,),  # the order of llama.cpp's files; a key of Ollama's converter
    "use_parallel_residual": (False,),
}

_YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the model's configuration with all keys that its architecture needs.

    `rope_parameters` holds the parameters of the rotary embedding, and `layer_types` the types of layers, if there are
    several. `num_hidden_layers` does not count multi-token prediction layers (`nextn`).

    Raises:
        ModelFileError: a key is missing or has the wrong type (the message names the key), or the architecture is not
            supported.
    """
    metadata = Metadata(file)
    if metadata.architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"{file.path.name}: unsupported architecture '{metadata.architecture}'; supported: {', '.join(FAMILIES)}"
        )
    model_type, readers = FAMILIES[metadata.architecture]
    config = {"model_type": model_type, **_common(file, metadata)}
    for read in readers:
        config |= read(metadata, config)
    # This check must be last, because it covers only the keys that no reader has read.
    metadata.require_neutral(_NEUTRAL)
    return config


def _common(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    tensors = file.tensors
    blocks, predict_layers = metadata.integer("block_count"), metadata.integer("nextn_predict_layers", 0, least=0)
    # Reject a false layer count before a model is built from it.
    if blocks > len(tensors):
        raise metadata.error("block_count", f"is {blocks}, but the file has only {len(tensors)} tensors")
    if predict_layers >= blocks:
        raise metadata.error("nextn_predict_layers", f"is {predict_layers}, expected less than block_count, {blocks}")
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    head_dim = hidden // heads
    if "attention.key_length" in metadata:
        head_dim = metadata.integer("attention.key_length")
    if not head_dim:
        raise metadata.error("attention.head_count", f"is {heads}, which is larger than embedding_length, {hidden}")
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        if metadata.architecture not in _LATENT | _TWO_SHAPES and metadata.integer(key, head_dim) != head_dim:
            raise metadata.unsupported(key, f"differs from {head_dim}, the width of a head, which is not supported")
    if (
        "attention.scale" in metadata
        and metadata.architecture not in _GRANITE
        and not math.isclose(metadata.number("attention.scale"), head_dim**-0.5, rel_tol=1e-4)
    ):
        raise metadata.unsupported("attention.scale", f"differs from 1 / sqrt({head_dim}), which is not supported")
    embedding = tensors.get("token_embd.weight")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if embedding is not None and is_list_of(tokens, str) and len(tokens) > embedding.shape[0]:
        raise ModelFileError(
            f"{file.path.name}: tokenizer.ggml.tokens lists {len(tokens)} tokens, but token_embd.weight has only "
            f"{embedding.shape[0]} rows"
        )
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": blocks - predict_layers,
        **({"num_nextn_predict_layers": predict_layers} if predict_layers else {}),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(metadata, blocks, heads),
        "head_dim": head_dim,
        "rms_norm_eps": _epsilon(metadata),
        "max_position_embeddings": metadata.integer("context_length"),
        "vocab_size": metadata.integer("vocab_size") if embedding is None else embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith(_ATTENTION_BIASES) for name in tensors),
        "rope_parameters": _rope(metadata, head_dim),
    }
    if embedding is not None and (suppressed := suppressed_tokens(file.metadata, embedding.shape[0])):
        config["suppress_tokens"] = suppressed
    for kind in ("bos", "eos"):
        token = metadata.token(kind)
        if token is not None:
            config[f"{kind}_token_id"] = token
    return config


def _epsilon(metadata: Metadata) -> float:
    key = "attention.layer_norm_rms_epsilon"
    if metadata.architecture in _LAYER_NORM_EPSILON and key not in metadata:
        key = "attention.layer_norm_epsilon"
    return metadata.number(key)


def _kv_heads(metadata: Metadata, blocks: int, heads: int) -> int:
    """Return the number of KV heads, which is the same in all layers with attention."""
    key = "attention.head_count_kv"
    if metadata.architecture in _TWO_SHAPES:
        return metadata.integers(key, blocks, heads)[0]
    if metadata.architecture not in _WITHOUT_ATTENTION:
        return metadata.integer(key, heads)
    numbers = {number for number in metadata.integers(key, blocks, heads) if number}
    if len(numbers) != 1:
        raise metadata.error(key, f"must be the same in all attention layers, but has {len(numbers)} different values")
    return numbers.pop()


def _rope(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    if metadata.architecture in _NEMOTRON:  # no rotary embedding; `rope.dimension_count` has an arbitrary value
        return {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
    dimensions = metadata.integer("rope.dimension_count", head_dim)
    if dimensions > head_dim or (metadata.architecture in INTERLEAVED and dimensions != head_dim):
        bound = "" if metadata.architecture in INTERLEAVED else "at most "
        raise metadata.error(
            "rope.dimension_count", f"is {dimensions}, expected {bound}{head_dim}, the width of a head"
        )
    different = metadata.integer("rope.dimension_count_swa", dimensions) != dimensions
    if different and metadata.architecture not in _TWO_SHAPES:
        raise metadata.error("rope.dimension_count_swa", f"differs from rope.dimension_count, which is {dimensions}")
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        "partial_rotary_factor": dimensions / head_dim,
    }
    key = "rope.scaling.factor" if "rope.scaling.factor" in metadata else "rope.scale_linear"
    kind = metadata.text("rope.scaling.type", "linear" if key in metadata else "none")
    if kind == "none" or (kind == "linear" and key not in metadata):
        return rope
    rope |= {"rope_type": kind, "factor": metadata.number(key)}
    if "rope.scaling.original_context_length" in metadata:
        rope["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
    for name, key in _YARN.items():
        if key in metadata:
            rope[name] = metadata.number(key)
    return rope
