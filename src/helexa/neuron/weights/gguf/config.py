"""Convert the metadata of a GGUF header to Hugging Face's `config.json`.

This module does not import torch. The meaning of each key follows llama.cpp's converters (`conversion/`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.header import is_list_of
from helexa.neuron.weights.gguf.metadata import Metadata, suppressed_tokens

_GRANITE = frozenset(["granite", "granitehybrid", "granitemoe", "granite_swa"])

# Architectures whose rows of q and k are interleaved in pairs, for a rotation of the whole head.
INTERLEAVED = frozenset(["arcee", "llama", "mistral3", "muse-glimmer", "smollm3", *_GRANITE])

_LATENT = frozenset(["deepseek2"])  # Architectures with latent attention, whose values have another width than the keys

# Architectures whose layers with a sliding window have other heads than the layers with full attention.
_TWO_SHAPES = frozenset(["gemma4"])

# Architectures in which layers without attention have 0 KV heads.
_WITHOUT_ATTENTION = frozenset(["granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"])

_SOFTMAX, _SIGMOID = 1, 2  # values of `expert_gating_func`

_ATTENTION_BIASES = (".attn_q.bias", ".attn_k.bias", ".attn_v.bias", ".attn_output.bias")

_EPSILON = {"stablelm": "attention.layer_norm_epsilon"}

_ConfigReader = Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the model's configuration with all keys that its architecture needs.

    `rope_parameters` holds the parameters of the rotary embedding, and `layer_types` the types of layers, if there are
    several. `num_hidden_layers` does not count multi-token prediction layers (`nextn`).

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
    # Last, because it skips the keys that were read. Other keys must not change the computation.
    metadata.require_neutral(_NEUTRAL)
    return config


# Values that do not change the computation, of llama.cpp's keys that this module reads for no architecture or for some
# architectures only. In llama.cpp, 0 turns a scale off.
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
        if metadata.architecture not in _LATENT | _TWO_SHAPES and metadata.integer(key, head_dim) != head_dim:
            raise metadata.error(key, f"differs from {head_dim}, the width of a head, which is not supported")
    if (
        "attention.scale" in metadata
        and metadata.architecture not in _GRANITE
        and not math.isclose(metadata.number("attention.scale"), head_dim**-0.5, rel_tol=1e-4)
    ):
        raise metadata.error("attention.scale", f"differs from 1 / sqrt({head_dim}), which is not supported")
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
        "rms_norm_eps": metadata.number(_EPSILON.get(metadata.architecture, "attention.layer_norm_rms_epsilon")),
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


def _kv_heads(metadata: Metadata, blocks: int, heads: int) -> int:
    """Return the number of KV heads, which is the same in all layers with attention."""
    key = "attention.head_count_kv"
    if metadata.architecture in _TWO_SHAPES:
        return metadata.integers(key, blocks, heads)[0]
    if metadata.architecture not in _WITHOUT_ATTENTION:
        return metadata.integer(key, heads)
    numbers = {number for number in metadata.integers(key, blocks, heads) if number}
    if len(numbers) != 1:
        raise metadata.error(key, f"has {len(numbers)} numbers other than 0, expected the same in all attention layers")
    return numbers.pop()


def _rope(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    dimensions = metadata.integer("rope.dimension_count", head_dim)
    if dimensions > head_dim or (metadata.architecture in INTERLEAVED and dimensions != head_dim):
        raise metadata.error("rope.dimension_count", f"is {dimensions}, but a head has {head_dim} numbers")
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


def _mistral3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of Ministral 3 if queries have a temperature, else of Mistral."""
    rope = dict(config["rope_parameters"])
    if "rope.scaling.yarn_log_multiplier" in metadata:
        rope |= {"mscale": 1.0, "mscale_all_dim": metadata.number("rope.scaling.yarn_log_multiplier")}
    if "attention.temperature_scale" not in metadata:
        return {"sliding_window": None, "rope_parameters": rope}
    rope["llama_4_scaling_beta"] = metadata.number("attention.temperature_scale")
    return {"model_type": "ministral3", "sliding_window": None, "rope_parameters": rope}


def _granite(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    scales = {
        "attention_multiplier": ("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": ("embedding_scale", 1.0),
        "logits_scaling": ("logit_scale", 1.0),
        "residual_multiplier": ("residual_scale", 1.0),
    }
    return {name: metadata.number(key, default) for name, (key, default) in scales.items()}


def _granite_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of experts, and the width of the MLP beside the experts."""
    shared = metadata.integer("expert_shared_feed_forward_length", 0, least=0)
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        **({"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}),
    }


def _granite_swa(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    theta = config["rope_parameters"]["rope_theta"]
    rotates = metadata.flags("attention.rope_pattern", layers) or [True] * layers
    return {
        "layer_rope_theta": [theta if flag else 0 for flag in rotates],
        "layer_types": _windowed(metadata, config, every=4),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def _olmo2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of OLMo 3 if the model has a sliding window, else of OLMo 2."""
    window = _window(metadata)
    if not window:
        return {}
    full = config["rope_parameters"]
    theta = metadata.number("rope.freq_base_swa", full["rope_theta"])
    return {
        "model_type": "olmo3",
        "layer_types": _windowed(metadata, config, every=4),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        **window,
    }


def _ernie4_5(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": config["attention_bias"]}


def _phi3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of LongRoPE, whose factors are tensors of the file."""
    rope = dict(config["rope_parameters"])
    original = metadata.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    if "rope.scaling.attn_factor" in metadata:
        factor = metadata.number("rope.scaling.attn_factor")
        rope |= {"rope_type": "longrope", "attention_factor": factor, "original_max_position_embeddings": original}
    window = metadata.integer("attention.sliding_window", 0, least=0)
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
        "sliding_window": window or None,
    }


def _exaone4(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    # As in llama.cpp, the model with 64 layers (32B) has a window even if the file does not contain its size.
    window = metadata.integer("attention.sliding_window", 4096 if layers == 64 else 0, least=0)
    if not window:
        return {"layer_types": ["full_attention"] * layers, "sliding_window": None}
    return {"layer_types": _windowed(metadata, config, every=4), "sliding_window": window}


def _stablelm(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_norm_eps": config["rms_norm_eps"], "use_qkv_bias": config["attention_bias"]}


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


def _deepseek_experts(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    dense = metadata.integer("leading_dense_block_count", 0, least=0)
    return {
        **(_dense(metadata, config) if dense or "feed_forward_length" in metadata else {}),
        "first_k_dense_replace": dense,
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_group": metadata.integer("expert_group_count", 1, least=0) or 1,
        "n_routed_experts": metadata.integer("expert_count"),
        "n_shared_experts": metadata.integer("expert_shared_count", 0, least=0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "routed_scaling_factor": _scale(metadata, "expert_weights_scale"),
        "topk_group": metadata.integer("expert_group_used_count", 1, least=0) or 1,
    }


def _scale(metadata: Metadata, key: str) -> float:
    """Return the factor at `key`, for which a missing key or 0 means 1."""
    return metadata.number(key) if metadata.is_set(key) else 1.0


def _glm4_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if metadata.integer("expert_gating_func", 0, least=0) not in (0, _SIGMOID):
        raise metadata.error("expert_gating_func", f"is not {_SIGMOID}, the sigmoid, which is not supported")
    return {"use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight")}


def _ernie4_5_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_k": metadata.integer("expert_used_count"),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step"),
        "moe_layer_start_index": metadata.integer("leading_dense_block_count", 0, least=0),
        "moe_num_experts": metadata.integer("expert_count"),
        "moe_num_shared_experts": metadata.integer("expert_shared_count", 0, least=0),
        "use_bias": config["attention_bias"],
    }


def _minimax_m2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if metadata.integer("expert_gating_func") != _SIGMOID:
        raise metadata.error("expert_gating_func", f"is not {_SIGMOID}, the sigmoid, which is not supported")
    return {
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "num_local_experts": metadata.integer("expert_count"),
    }


def _deepseek2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rotated, rank = metadata.integer("rope.dimension_count"), metadata.integer("attention.kv_lora_rank")
    # Older files have one tensor for keys and values, and the widths of a head without the suffix `_mla`.
    suffix = "_mla" if "attention.key_length_mla" in metadata else ""
    key, value = (metadata.integer(f"attention.{kind}_length{suffix}") for kind in ("key", "value"))
    if key <= rotated:
        raise metadata.error(f"attention.key_length{suffix}", f"is {key}, of which {rotated} numbers are rotated")
    rope = {**config["rope_parameters"], "partial_rotary_factor": 1.0}
    if metadata.is_set("rope.scaling.yarn_log_multiplier"):
        # The converter writes a tenth. The file does not contain `mscale`, which is the same in all released models.
        sharpness = round(10 * metadata.number("rope.scaling.yarn_log_multiplier"), 6)
        rope |= {"mscale": sharpness, "mscale_all_dim": sharpness}
    model_type = _deepseek2_type(metadata, config)
    grouped = {"topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"}
    return {
        "model_type": model_type,
        "head_dim": rotated,
        "kv_lora_rank": rank,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": metadata.integer("attention.q_lora_rank") if "attention.q_lora_rank" in metadata else None,
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "rope_parameters": rope,
        "v_head_dim": value,
        **(grouped if model_type == "deepseek_v2" else {"rope_interleave": True}),
    }


def _deepseek2_type(metadata: Metadata, config: Mapping[str, Any]) -> str:
    # As in llama.cpp, which recognizes GLM-4.7-Flash in files without the function of scores.
    is_glm = config["num_hidden_layers"] == 47 and config["vocab_size"] == 154880
    function = metadata.integer("expert_gating_func", 0, least=0) or (_SIGMOID if is_glm else _SOFTMAX)
    if function not in (_SOFTMAX, _SIGMOID):
        raise metadata.error("expert_gating_func", f"is {function}, which is not supported for this architecture")
    if function == _SOFTMAX:
        return "deepseek_v2"
    return "glm4_moe_lite" if is_glm else "deepseek_v3"


def _linear(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = metadata.integer("ssm.time_step_rank")
    interval = metadata.integer("full_attention_interval", 4)
    return {
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": _head_width(metadata, heads),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "layer_types": _layer_types(metadata, config, "linear_attention", "attention.recurrent_layers", interval),
    }


def _lfm2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    kv_heads = metadata.integers("attention.head_count_kv", config["num_hidden_layers"], config["num_key_value_heads"])
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "norm_eps": config["rms_norm_eps"],
    }


def _lfm2_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    _require_sigmoid(metadata)
    return {"num_dense_layers": metadata.integer("leading_dense_block_count", 0, least=0)}


def _granite_hybrid(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    heads, experts = metadata.integer("ssm.time_step_rank"), metadata.integer("expert_count", 0, least=0)
    kv_heads = metadata.integers("attention.head_count_kv", config["num_hidden_layers"], config["num_key_value_heads"])
    width = metadata.integer("feed_forward_length")  # of the experts, or of the MLP of a model without experts
    shared = metadata.integer("expert_shared_feed_forward_length") if experts else width
    return {
        "intermediate_size": width,
        "layer_types": ["full_attention" if kv else "linear_attention" for kv in kv_heads],
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_d_head": _head_width(metadata, heads),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_expand": metadata.integer("ssm.inner_size") // config["hidden_size"],
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_n_heads": heads,
        "num_local_experts": experts,
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", True) else "nope",
        "shared_intermediate_size": shared,
        **({"num_experts_per_tok": metadata.integer("expert_used_count")} if experts else {}),
    }


def _nemotron_h(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], metadata.integer("ssm.time_step_rank")
    kv_heads = metadata.integers("attention.head_count_kv", layers, config["num_key_value_heads"])
    widths, mlp = metadata.integers("feed_forward_length", layers), "moe" if "expert_count" in metadata else "mlp"
    if len({*widths} - {0}) > 1:
        raise metadata.error("feed_forward_length", "has several numbers other than 0, which is not supported")
    types = [
        "full_attention" if kv else mlp if width else "linear_attention"
        for kv, width in zip(kv_heads, widths, strict=True)
    ]
    return {
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "layers_block_type": types,
        "mamba_head_dim": _head_width(metadata, heads),
        "mamba_num_heads": heads,
        "n_groups": metadata.integer("ssm.group_count"),
        "ssm_state_size": metadata.integer("ssm.state_size"),
        **({} if mlp == "moe" or not any(widths) else {"intermediate_size": max(widths)}),
    }


def _nemotron_h_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    _require_sigmoid(metadata)
    return {
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_latent_size": metadata.integer("moe_latent_size", 0, least=0) or None,
        "moe_shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "n_group": metadata.integer("expert_group_count", 1),
        "n_routed_experts": metadata.integer("expert_count"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }


def _require_sigmoid(metadata: Metadata) -> None:
    if metadata.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise metadata.error("expert_gating_func", f"is not {_SIGMOID}, the sigmoid, which is not supported")


def _head_width(metadata: Metadata, heads: int) -> int:
    """Return the width of each of `heads` heads of a recurrent layer."""
    width = metadata.integer("ssm.inner_size")
    if width % heads:
        raise metadata.error("ssm.inner_size", f"does not divide into {heads} heads")
    return width // heads


def _muse_glimmer(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "final_logit_softcapping": _soft_cap(metadata, "final_logit_softcapping"),
        "layer_types": _windowed(metadata, config, every=4),
        "output_multiplier": metadata.number("logit_scale"),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def _gemma2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        # The file does not contain this value. It differs only in the 27B model, the only model with 46 layers.
        "query_pre_attn_scalar": hidden // heads if config["num_hidden_layers"] == 46 else config["head_dim"],
        "layer_types": _windowed(metadata, config, every=2),
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": _soft_cap(metadata, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _soft_cap(metadata, "final_logit_softcapping", 30.0),
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


def _gemma4(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kinds = _windowed(metadata, config, every=6)
    dims = {"full_attention": config["head_dim"], "sliding_attention": metadata.integer("attention.key_length_swa")}
    for key, kind in (
        ("attention.value_length", "full_attention"),
        ("attention.value_length_swa", "sliding_attention"),
    ):
        if metadata.integer(key, dims[kind]) != dims[kind]:
            raise metadata.error(key, f"differs from the width of a key head, {dims[kind]}, which is not supported")
    kv_heads = dict(zip(kinds, metadata.integers("attention.head_count_kv", layers, heads), strict=True))
    if [kv_heads[kind] for kind in kinds] != metadata.integers("attention.head_count_kv", layers, heads):
        raise metadata.error("attention.head_count_kv", "differs between layers of the same type")
    shared, widths = _shared_layers(metadata, layers), metadata.integers("feed_forward_length", layers)
    wide = shared > 0 and widths[-1] == 2 * widths[0]
    if widths != [widths[0]] * (layers - shared) + [widths[-1]] * shared or widths[-1] != widths[0] * (1 + wide):
        raise metadata.error(
            "feed_forward_length", f"is not one number, or twice this number in the last {shared} layers"
        )
    if not metadata.has_tensor("rope_freqs.weight"):
        raise metadata.error("rope.dimension_count", "needs the tensor rope_freqs.weight, which is missing")
    rope = config["rope_parameters"]
    rotated = metadata.integer("rope.dimension_count_swa", dims["sliding_attention"])
    local = {
        "rope_type": "default",
        "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0),
        "partial_rotary_factor": rotated / dims["sliding_attention"],
    }
    own = [index for index in range(layers - shared) if kinds[index] == "full_attention"]
    experts = metadata.integer("expert_count", 0, least=0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": dims["sliding_attention"],
        "global_head_dim": dims["full_attention"],
        "num_key_value_heads": kv_heads.get("sliding_attention", config["num_key_value_heads"]),
        "num_global_key_value_heads": kv_heads.get("full_attention"),
        "attention_k_eq_v": any(not metadata.has_tensor(f"blk.{index}.attn_v.weight") for index in own),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "intermediate_size": widths[0],
        "vocab_size_per_layer_input": config["vocab_size"],
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0, least=0),
        "final_logit_softcapping": _soft_cap(metadata, "final_logit_softcapping"),
        "layer_types": kinds,
        "sliding_window": metadata.integer("attention.sliding_window"),
        # The tensor `rope_freqs.weight` says which pairs of a head are rotated.
        "rope_parameters": {"full_attention": {**rope, "rope_type": "proportional"}, "sliding_attention": local}
        if rope["rope_type"] == "default"
        else {"full_attention": rope, "sliding_attention": local},
        "enable_moe_block": experts > 0,
        **(_gemma4_experts(metadata) if experts else {}),
    }


def _shared_layers(metadata: Metadata, layers: int) -> int:
    shared = metadata.integer("attention.shared_kv_layers", 0, least=0)
    if shared >= layers:
        raise metadata.error("attention.shared_kv_layers", f"is {shared}, of {layers} layers")
    return shared


def _soft_cap(metadata: Metadata, key: str, default: float | None = None) -> float | None:
    """Return a soft cap; None if it is 0, which means no cap, or without `default`."""
    if key not in metadata:
        return default
    return metadata.number(key) if metadata.is_set(key) else None


def _gemma4_experts(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.integer("expert_count"),
        "top_k_experts": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
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
    """Return the type of each layer, which is either `marked` or `full_attention`."""
    layers = config["num_hidden_layers"]
    # Without a list of flags, each `every`-th layer has full attention.
    flags = metadata.flags(key, layers) or [(index + 1) % every != 0 for index in range(layers)]
    return [marked if flag else "full_attention" for flag in flags]


# Architecture -> model type, and the functions that add family-specific keys.
_FAMILIES: dict[str, tuple[str, tuple[_ConfigReader, ...]]] = {
    "llama": ("llama", (_dense, _llama)),
    "mistral3": ("mistral", (_dense, _mistral3)),
    "granite": ("granite", (_dense, _granite)),
    "granitemoe": ("granitemoe", (_dense, _granite, _granite_moe)),
    "granite_swa": ("granite_swa", (_dense, _granite, _granite_swa)),
    "smollm3": ("smollm3", (_dense,)),
    "olmo2": ("olmo2", (_dense, _olmo2)),
    "exaone4": ("exaone4", (_dense, _exaone4)),
    "ernie4_5": ("ernie4_5", (_dense, _ernie4_5)),
    "hunyuan-dense": ("hunyuan_v1_dense", (_dense,)),
    "phi3": ("phi3", (_dense, _phi3)),
    "stablelm": ("stablelm", (_dense, _stablelm)),
    "seed_oss": ("seed_oss", (_dense,)),
    "arcee": ("arcee", (_dense,)),
    "qwen2": ("qwen2", (_dense,)),
    "qwen3": ("qwen3", (_dense,)),
    "qwen3moe": ("qwen3_moe", (_experts,)),
    "qwen3next": ("qwen3_next", (_experts, _linear)),
    "qwen35": ("qwen3_5", (_dense, _linear)),
    "qwen35moe": ("qwen3_5_moe", (_experts, _linear)),
    "lfm2": ("lfm2", (_dense, _lfm2)),
    "lfm2moe": ("lfm2_moe", (_experts, _lfm2, _lfm2_moe)),
    "glm4moe": ("glm4_moe", (_deepseek_experts, _glm4_moe)),
    "ernie4_5-moe": ("ernie4_5_moe", (_dense, _ernie4_5_moe)),
    "minimax-m2": ("minimax_m2", (_minimax_m2,)),
    "deepseek2": ("deepseek_v3", (_deepseek_experts, _deepseek2)),
    "granitehybrid": ("granitemoehybrid", (_granite, _granite_hybrid)),
    "nemotron_h": ("nemotron_h", (_nemotron_h,)),
    "nemotron_h_moe": ("nemotron_h", (_nemotron_h, _nemotron_h_moe)),
    "muse-glimmer": ("muse_glimmer", (_dense, _muse_glimmer)),
    "gemma2": ("gemma2", (_dense, _gemma2)),
    "gemma3": ("gemma3", (_dense, _gemma3)),
    "gemma4": ("gemma4", (_gemma4,)),
    "gpt-oss": ("gpt_oss", (_gpt_oss,)),
}
