"""Read the settings of experts and of recurrent layers from a GGUF header.

Each function reads the keys of one architecture, or of several with the same keys, for `FAMILIES` in
`architecture_settings.py`. A model with recurrent layers often has experts, too.
"""

from collections.abc import Mapping
from typing import Any

from helexa.neuron.weights.gguf.typed_metadata_and_token_types import Metadata

_SOFTMAX, _SIGMOID = 1, 2  # values of `expert_gating_func`


def experts(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and widths of experts, with the keys of Qwen3-MoE's config."""
    keys = {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
    }
    if "feed_forward_length" in metadata:
        keys["intermediate_size"] = metadata.integer("feed_forward_length")
    if "expert_shared_feed_forward_length" in metadata:
        keys["shared_expert_intermediate_size"] = metadata.integer("expert_shared_feed_forward_length")
    return keys


def deepseek_experts(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers, widths and groups of experts, with keys of DeepSeek-V3's config."""
    dense = metadata.integer("leading_dense_block_count", 0, least=0)
    has_mlp = dense or "feed_forward_length" in metadata
    return {
        **({"intermediate_size": metadata.integer("feed_forward_length")} if has_mlp else {}),
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
    """Return the factor at `key`; 1 if the key is missing or the factor is 0."""
    return metadata.number(key) if metadata.is_set(key) else 1.0


def glm4_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of GLM 4.5 that `deepseek_experts` does not return."""
    if (function := metadata.integer("expert_gating_func", 0, least=0)) not in (0, _SIGMOID):
        raise metadata.unsupported("expert_gating_func", f"is {function}, but only {_SIGMOID} (sigmoid) is supported")
    return {"use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight")}


def ernie4_5_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of experts of ERNIE 4.5, and which layers have experts."""
    return {
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_k": metadata.integer("expert_used_count"),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step"),
        "moe_layer_start_index": metadata.integer("leading_dense_block_count", 0, least=0),
        "moe_num_experts": metadata.integer("expert_count"),
        "moe_num_shared_experts": metadata.integer("expert_shared_count", 0, least=0),
        "use_bias": config["attention_bias"],
    }


def olmoe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of OLMoE's experts, whose width is `feed_forward_length`."""
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def minimax_m2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and width of MiniMax-M2's experts; require sigmoid scores."""
    if (function := metadata.integer("expert_gating_func")) != _SIGMOID:
        raise metadata.unsupported("expert_gating_func", f"is {function}, but only {_SIGMOID} (sigmoid) is supported")
    return {
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "num_local_experts": metadata.integer("expert_count"),
    }


def deepseek2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the widths of latent attention, and the model type: DeepSeek or GLM 4.7."""
    rotated, rank = metadata.integer("rope.dimension_count"), metadata.integer("attention.kv_lora_rank")
    # Older files have one tensor for keys and values, and the widths of a head without the suffix `_mla`.
    suffix = "_mla" if "attention.key_length_mla" in metadata else ""
    key, value = (metadata.integer(f"attention.{kind}_length{suffix}") for kind in ("key", "value"))
    if key <= rotated:
        raise metadata.error(
            f"attention.key_length{suffix}", f"is {key}, expected more than rope.dimension_count, {rotated}"
        )
    rope = {**config["rope_parameters"], "partial_rotary_factor": 1.0}
    if metadata.is_set("rope.scaling.yarn_log_multiplier"):
        # The converter writes a tenth of `mscale_all_dim`. The file does not contain `mscale`, which has the same value
        # in all released models.
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
    # Files of GLM-4.7-Flash may lack `expert_gating_func`. As in llama.cpp, these sizes identify the model.
    is_glm = config["num_hidden_layers"] == 47 and config["vocab_size"] == 154880
    function = metadata.integer("expert_gating_func", 0, least=0) or (_SIGMOID if is_glm else _SOFTMAX)
    if function not in (_SOFTMAX, _SIGMOID):
        raise metadata.unsupported("expert_gating_func", f"is {function}, which is not supported for this architecture")
    if function == _SOFTMAX:
        return "deepseek_v2"
    return "glm4_moe_lite" if is_glm else "deepseek_v3"


def linear(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the heads of Gated DeltaNet layers, and the type of each layer."""
    heads = metadata.integer("ssm.time_step_rank")
    layers, interval = config["num_hidden_layers"], metadata.integer("full_attention_interval", 4)
    types = metadata.layer_types("linear_attention", "attention.recurrent_layers", layers, interval)
    kv_heads = metadata.integers("attention.head_count_kv", layers, config["num_key_value_heads"])
    # Files of Ollama's converter mark recurrent layers by 0 KV heads.
    if 0 in kv_heads:
        types = ["full_attention" if number else "linear_attention" for number in kv_heads]
    return {
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": _head_width(metadata, heads),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "layer_types": types,
    }


def lfm2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window of LFM2's convolutions, and the type of each layer."""
    kv_heads = metadata.integers("attention.head_count_kv", config["num_hidden_layers"], config["num_key_value_heads"])
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "norm_eps": config["rms_norm_eps"],
    }


def lfm2_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of leading layers of LFM2 that have no experts."""
    _require_sigmoid(metadata)
    return {"num_dense_layers": metadata.integer("leading_dense_block_count", 0, least=0)}


def granite_hybrid(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of Mamba-2 layers and experts, with keys of Granite 4's config."""
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


def nemotron_h(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Nemotron-H's Mamba-2 layers, and each layer's type."""
    layers, heads = config["num_hidden_layers"], metadata.integer("ssm.time_step_rank")
    kv_heads = metadata.integers("attention.head_count_kv", layers, config["num_key_value_heads"])
    widths, mlp = metadata.integers("feed_forward_length", layers), "moe" if "expert_count" in metadata else "mlp"
    if len({*widths} - {0}) > 1:
        raise metadata.unsupported(
            "feed_forward_length", f"has the values {sorted({*widths})[:8]}, expected 0 and only one other number"
        )
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


def nemotron_h_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers, widths and groups of experts of Nemotron-H."""
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
    if (function := metadata.integer("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise metadata.unsupported("expert_gating_func", f"is {function}, but only {_SIGMOID} (sigmoid) is supported")


def _head_width(metadata: Metadata, heads: int) -> int:
    """Return the width of each of `heads` heads of a recurrent layer."""
    width = metadata.integer("ssm.inner_size")
    if width % heads:
        raise metadata.error("ssm.inner_size", f"does not divide into {heads} heads")
    return width // heads
