"""Convert the metadata of a GGUF header to a configuration with the keys of Hugging Face's `config.json`.

This module does not import torch. The meaning of each key follows llama.cpp's converters (`conversion/`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.metadata import Metadata
from helexa.neuron.weights.gguf.token_types import suppressed_tokens

_ATTENTION_BIASES = (".attn_q.bias", ".attn_k.bias", ".attn_v.bias", ".attn_output.bias")

_ConfigReader = Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the model's configuration, with all keys that the model's architecture needs.

    `rope_parameters` holds the parameters of the rotary embedding. If a model has several types of layers, for example
    full and linear attention, `layer_types` lists the type of each layer. `num_hidden_layers` does not count
    multi-token prediction layers (`nextn`).

    Raises:
        ModelFileError: a key is missing or has the wrong type (the message names the key), or the architecture is not
            supported.
    """
    metadata = Metadata(file)
    if metadata.architecture not in _FAMILIES:
        raise ModelFileError(
            f"{file.path.name}: unsupported architecture '{metadata.architecture}'; supported: {', '.join(_FAMILIES)}"
        )
    model_type, readers = _FAMILIES[metadata.architecture]
    config = {"model_type": model_type, **_common(file, metadata)}
    for read in readers:
        config |= read(metadata, config)
    metadata.require_neutral(_NEUTRAL)
    return config


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
    "expert_gating_func": (0, 1, 3),  # softmax over all experts, or over the selected experts in gpt-oss
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
    "use_parallel_residual": (False,),
}
"""Values that do not change the computation, of llama.cpp's keys that this module reads for no architecture or for some
architectures only. In llama.cpp, 0 turns a scale off."""


def _common(file: GgufFile, metadata: Metadata) -> dict[str, Any]:
    tensors = file.tensors
    blocks, predict_layers = metadata.integer("block_count"), metadata.integer("nextn_predict_layers", 0, least=0)
    # Reject a false layer count before a model is built from it.
    if blocks > len(tensors):
        raise metadata.error("block_count", f"is larger than the file's {len(tensors)} tensors can fill")
    if predict_layers >= blocks:
        raise metadata.error("nextn_predict_layers", f"leaves none of {blocks} layers")
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    head_dim = hidden // heads
    if "attention.key_length" in metadata:
        head_dim = metadata.integer("attention.key_length")
    if not head_dim:
        raise metadata.error("attention.head_count", "is larger than the hidden size")
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        if metadata.integer(key, head_dim) != head_dim:
            raise metadata.error(key, f"differs from {head_dim}, the width of a head, which is not supported")
    if "attention.scale" in metadata and not math.isclose(
        metadata.number("attention.scale"), head_dim**-0.5, rel_tol=1e-4
    ):
        raise metadata.error("attention.scale", f"differs from 1 / sqrt({head_dim}), which is not supported")
    embedding = tensors.get("token_embd.weight")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if embedding is not None and isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise ModelFileError(
            f"{file.path.name}: tokenizer.ggml.tokens lists {len(tokens)} tokens, but token_embd.weight has only "
            f"{embedding.shape[0]} rows"
        )
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": blocks - predict_layers,
        **({"num_nextn_predict_layers": predict_layers} if predict_layers else {}),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
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


def _rope(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    dimensions = metadata.integer("rope.dimension_count", head_dim)
    # The rows of llama's q and k are interleaved for a rotation of the whole head.
    if dimensions > head_dim or (metadata.architecture == "llama" and dimensions != head_dim):
        raise metadata.error("rope.dimension_count", f"is {dimensions}, but a head has {head_dim} numbers")
    if metadata.integer("rope.dimension_count_swa", dimensions) != dimensions:
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


_YARN = {
    "attention_factor": "rope.scaling.yarn_attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def _dense(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": metadata.integer("feed_forward_length")}


def _llama(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if metadata.integer("expert_count", 0, least=0):
        raise metadata.error("expert_count", "makes it a mixture of experts, which is not supported here")
    window = _window(metadata)
    return {"model_type": "mistral", **window} if window else {}  # a sliding window is the only difference from llama


def _experts(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
    }
    if "feed_forward_length" in metadata:
        keys |= _dense(metadata, config)
    if "expert_shared_feed_forward_length" in metadata:
        keys["shared_expert_intermediate_size"] = metadata.integer("expert_shared_feed_forward_length")
    return keys


def _linear(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if width % heads:
        raise metadata.error("ssm.inner_size", f"does not divide into {heads} heads")
    interval = metadata.integer("full_attention_interval", 4)
    return {
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "layer_types": _layer_types(metadata, config, "linear_attention", "attention.recurrent_layers", interval),
    }


def _gemma3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}
    window = _window(metadata)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        # The file does not contain this value. It differs only in the 27B model, the only model with 62 layers.
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_dim,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "layer_types": _windowed(metadata, config, every=6) if window else ["full_attention"] * layers,
        **window,
    }


def _gpt_oss(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
        "swiglu_limit": 7.0,
        "layer_types": _windowed(metadata, config, every=2),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def _window(metadata: Metadata) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0, least=0)
    return {"sliding_window": window} if window else {}


def _windowed(metadata: Metadata, config: Mapping[str, Any], every: int) -> list[str]:
    key = "attention.sliding_window_pattern"
    if metadata.flags(key, config["num_hidden_layers"]) is None:
        every = metadata.integer(key, every)
    return _layer_types(metadata, config, "sliding_attention", key, every)


def _layer_types(metadata: Metadata, config: Mapping[str, Any], marked: str, key: str, every: int) -> list[str]:
    """Return the type of each layer, which is either `marked` or `full_attention`.

    If the metadata has a list of flags at `key`, the layers with a true flag have the type `marked`. Without a list,
    each `every`-th layer has full attention and all other layers have the type `marked`.
    """
    layers = config["num_hidden_layers"]
    flags = metadata.flags(key, layers) or [(index + 1) % every != 0 for index in range(layers)]
    return [marked if flag else "full_attention" for flag in flags]


# Architecture -> model type, and the functions that add family-specific keys.
_FAMILIES: dict[str, tuple[str, tuple[_ConfigReader, ...]]] = {
    "llama": ("llama", (_dense, _llama)),
    "qwen2": ("qwen2", (_dense,)),
    "qwen3": ("qwen3", (_dense,)),
    "qwen3moe": ("qwen3_moe", (_experts,)),
    "qwen3next": ("qwen3_next", (_experts, _linear)),
    "qwen35": ("qwen3_5", (_dense, _linear)),
    "qwen35moe": ("qwen3_5_moe", (_experts, _linear)),
    "gemma3": ("gemma3", (_dense, _gemma3)),
    "gpt-oss": ("gpt_oss", (_gpt_oss,)),
}
