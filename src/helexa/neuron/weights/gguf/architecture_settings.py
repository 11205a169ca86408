"""Read the settings of each architecture from a GGUF header.

`FAMILIES` lists the supported architectures. The meaning of each key follows llama.cpp's converters (`conversion/`).
"""

from collections.abc import Callable, Mapping
from typing import Any

from helexa.neuron.weights.gguf import expert_and_recurrent_settings as experts
from helexa.neuron.weights.gguf.typed_metadata_and_token_types import Metadata

_ConfigReader = Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]


def _dense(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"intermediate_size": metadata.integer("feed_forward_length")}


def _llama(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if metadata.integer("expert_count", 0, least=0):
        raise metadata.unsupported(
            "expert_count", "is not 0: a mixture of experts of this architecture is not supported"
        )
    window = _window(metadata)
    return {"model_type": "mistral", **window} if window else {}  # Llama with a sliding window is Mistral


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
    """Return the numbers of experts; with a shared MLP, its width and the model type."""
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
        "layer_types": metadata.windowed_layers(config["num_hidden_layers"], every=4),
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
        "layer_types": metadata.windowed_layers(config["num_hidden_layers"], every=4),
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
    return {"layer_types": metadata.windowed_layers(layers, every=4), "sliding_window": window}


def _stablelm(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_norm_eps": config["rms_norm_eps"], "use_qkv_bias": config["attention_bias"]}


def _cohere(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_norm_eps": config["rms_norm_eps"], "logit_scale": metadata.number("logit_scale")}


def _cohere2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": metadata.windowed_layers(config["num_hidden_layers"], every=4),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def _muse_glimmer(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "final_logit_softcapping": _soft_cap(metadata, "final_logit_softcapping"),
        "layer_types": metadata.windowed_layers(config["num_hidden_layers"], every=4),
        "output_multiplier": metadata.number("logit_scale"),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def _gemma2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        # The file does not contain this value. It is the head width, except in the 27B model. Only 27B has 46 layers.
        "query_pre_attn_scalar": hidden // heads if config["num_hidden_layers"] == 46 else config["head_dim"],
        "layer_types": metadata.windowed_layers(config["num_hidden_layers"], every=2),
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
        # The file does not contain this value. It is the head width, except in the 27B model. Only 27B has 62 layers.
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_dim,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "layer_types": metadata.windowed_layers(config["num_hidden_layers"], every=6)
        if window
        else ["full_attention"] * layers,
        **window,
    }


def _gemma4(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kinds = metadata.windowed_layers(config["num_hidden_layers"], every=6)
    dims = {"full_attention": config["head_dim"], "sliding_attention": metadata.integer("attention.key_length_swa")}
    for key, kind in (
        ("attention.value_length", "full_attention"),
        ("attention.value_length_swa", "sliding_attention"),
    ):
        if metadata.integer(key, dims[kind]) != dims[kind]:
            raise metadata.unsupported(
                key, f"differs from the width of a key head, {dims[kind]}, which is not supported"
            )
    kv_heads = dict(zip(kinds, metadata.integers("attention.head_count_kv", layers, heads), strict=True))
    if [kv_heads[kind] for kind in kinds] != metadata.integers("attention.head_count_kv", layers, heads):
        raise metadata.error(
            "attention.head_count_kv", "differs between layers of the same type, sliding window or full attention"
        )
    shared, widths = _shared_layers(metadata, layers), metadata.integers("feed_forward_length", layers)
    wide = shared > 0 and widths[-1] == 2 * widths[0]
    if widths != [widths[0]] * (layers - shared) + [widths[-1]] * shared or widths[-1] != widths[0] * (1 + wide):
        raise metadata.error(
            "feed_forward_length", f"must be the same in all layers, or twice as large in the last {shared} layers"
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
    expert_count = metadata.integer("expert_count", 0, least=0)
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
        "enable_moe_block": expert_count > 0,
        **(_gemma4_experts(metadata) if expert_count else {}),
    }


def _shared_layers(metadata: Metadata, layers: int) -> int:
    shared = metadata.integer("attention.shared_kv_layers", 0, least=0)
    if shared >= layers:
        raise metadata.error(
            "attention.shared_kv_layers", f"is {shared}, expected less than the number of layers, {layers}"
        )
    return shared


def _soft_cap(metadata: Metadata, key: str, default: float | None = None) -> float | None:
    """Return the soft cap at `key`; None if it is 0; `default` if the key is missing."""
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
        "layer_types": metadata.windowed_layers(config["num_hidden_layers"], every=2),
        "sliding_window": metadata.integer("attention.sliding_window"),
    }


def _window(metadata: Metadata) -> dict[str, Any]:
    window = metadata.integer("attention.sliding_window", 0, least=0)
    return {"sliding_window": window} if window else {}


# For each GGUF architecture: the `model_type`, and the functions that read the keys that only some architectures have.
FAMILIES: dict[str, tuple[str, tuple[_ConfigReader, ...]]] = {
    "llama": ("llama", (_dense, _llama)),
    "mistral3": ("mistral", (_dense, _mistral3)),
    "granite": ("granite", (_dense, _granite)),
    "granitemoe": ("granitemoe", (_dense, _granite, _granite_moe)),
    "granite_swa": ("granite_swa", (_dense, _granite, _granite_swa)),
    "smollm3": ("smollm3", (_dense,)),
    "olmo2": ("olmo2", (_dense, _olmo2)),
    "olmoe": ("olmoe", (_dense, experts.olmoe)),
    "exaone4": ("exaone4", (_dense, _exaone4)),
    "ernie4_5": ("ernie4_5", (_dense, _ernie4_5)),
    "hunyuan-dense": ("hunyuan_v1_dense", (_dense,)),
    "phi3": ("phi3", (_dense, _phi3)),
    "stablelm": ("stablelm", (_dense, _stablelm)),
    "command-r": ("cohere", (_dense, _cohere)),
    "cohere2": ("cohere2", (_dense, _cohere, _cohere2)),
    "seed_oss": ("seed_oss", (_dense,)),
    "arcee": ("arcee", (_dense,)),
    "qwen2": ("qwen2", (_dense,)),
    "qwen3": ("qwen3", (_dense,)),
    "qwen3moe": ("qwen3_moe", (experts.experts,)),
    "qwen3next": ("qwen3_next", (experts.experts, experts.linear)),
    "qwen35": ("qwen3_5", (_dense, experts.linear)),
    "qwen35moe": ("qwen3_5_moe", (experts.experts, experts.linear)),
    "lfm2": ("lfm2", (_dense, experts.lfm2)),
    "lfm2moe": ("lfm2_moe", (experts.experts, experts.lfm2, experts.lfm2_moe)),
    "glm4": ("glm4", (_dense,)),
    "glm4moe": ("glm4_moe", (experts.deepseek_experts, experts.glm4_moe)),
    "ernie4_5-moe": ("ernie4_5_moe", (_dense, experts.ernie4_5_moe)),
    "minimax-m2": ("minimax_m2", (experts.minimax_m2,)),
    "deepseek2": ("deepseek_v3", (experts.deepseek_experts, experts.deepseek2)),
    "granitehybrid": ("granitemoehybrid", (_granite, experts.granite_hybrid)),
    "nemotron_h": ("nemotron_h", (experts.nemotron_h,)),
    "nemotron_h_moe": ("nemotron_h", (experts.nemotron_h, experts.nemotron_h_moe)),
    "muse-glimmer": ("muse_glimmer", (_dense, _muse_glimmer)),
    "gemma": ("gemma", (_dense,)),
    "gemma2": ("gemma2", (_dense, _gemma2)),
    "gemma3": ("gemma3", (_dense, _gemma3)),
    "gemma4": ("gemma4", (_gemma4,)),
    "gpt-oss": ("gpt_oss", (_gpt_oss,)),
}
