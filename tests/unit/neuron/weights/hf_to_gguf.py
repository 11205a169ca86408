"""Convert tiny Hugging Face models to GGUF files, following the rules of llama.cpp's converter."""

import re
from collections.abc import Callable, Iterator
from math import log
from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedConfig

GRANITE = ("granite", "granitehybrid", "granitemoe", "granite_swa")
INTERLEAVED = ("arcee", "llama", "mistral3", "muse-glimmer", "nemotron_h", "nemotron_h_moe", "smollm3", *GRANITE)
ARCHITECTURES = {
    "llama": "llama",
    "ministral3": "mistral3",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "granite_swa": "granite_swa",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan-dense",
    "phi3": "phi3",
    "stablelm": "stablelm",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "seed_oss": "seed_oss",
    "arcee": "arcee",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe_lite": "deepseek2",
    "minimax_m2": "minimax-m2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "muse_glimmer_text": "muse-glimmer",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
}
NAMES = [
    ("self_attn.qkv_proj", "attn_qkv"),
    ("mlp.gate_up_proj", "ffn_up"),
    (r"self_attn\.([qk])(uery|ey)_layernorm", r"attn_\1_norm"),
    (r"block_sparse_moe\.experts\.(\w+)_proj", r"ffn_\1_exps"),
    ("block_sparse_moe.router", "ffn_gate_inp"),
    ("ffn_norm_2", "pre_ffw_norm_2"),
    ("model.embed_tokens_per_layer", "per_layer_token_embd"),
    ("model.per_layer_model_projection", "per_layer_model_proj"),
    ("model.per_layer_projection_norm", "per_layer_proj_norm"),
    ("layer_scalar", "layer_output_scale.weight"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
    ("router.proj", "ffn_gate_inp"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
    (r"(?<=\d\.)experts\.(\w+)_proj", r"ffn_\1_exps"),
    ("model.embed_tokens", "token_embd"),
    ("model.norm(_f)?", "output_norm"),
    ("lm_head", "output"),
    (r"model\.layers", "blk"),
    ("model.embeddings", "token_embd"),
    (r"(?<=\d\.)norm\.", "attn_norm."),
    (r"mixer\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"mixer\.gate\.", "ffn_gate_inp."),
    (r"mixer\.experts\.(\w+)_proj", r"ffn_\1_exps"),
    ("mixer.fc1_latent_proj", "ffn_latent_down"),
    ("mixer.fc2_latent_proj", "ffn_latent_up"),
    (r"mixer\.shared_experts\.(\w+)_proj", r"ffn_\1_shexp"),
    (r"mixer\.o_proj", "attn_output"),
    (r"mixer\.([qkv])_proj", r"attn_\1"),
    (r"(?:mixer|mamba)\.(in|out)_proj", r"ssm_\1"),
    (r"mixer\.(up|down)_proj", r"ffn_\1"),
    ("(mixer|mamba).A_log", "ssm_a"),
    ("(mixer|mamba).D", "ssm_d"),
    ("(mixer|mamba).dt_bias", "ssm_dt.bias"),
    (r"(?:mixer|mamba)\.(conv1d|norm)", r"ssm_\1"),
    (r"block_sparse_moe\.experts\.(\w+)_proj", r"ffn_\1_exps"),
    ("block_sparse_moe.router", "ffn_gate_inp"),
    (r"shared_mlp\.(\w+)_proj", r"ffn_\1_shexp"),
    ("model.embedding_norm", "token_embd_norm"),
    ("self_attn.(o|out)_proj", "attn_output"),
    (r"self_attn\.([qk])_layernorm", r"attn_\1_norm"),
    ("operator_norm", "attn_norm"),
    (r"(?<=\d\.)conv\.", "shortconv."),
    ("feed_forward.expert_bias", "exp_probs_b.bias"),
    (r"feed_forward.experts.(\w+)_proj", r"ffn_\1_exps"),
    (r"feed_forward\.gate\.", "ffn_gate_inp."),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w2", "ffn_down"),
    ("feed_forward.w3", "ffn_up"),
    (r"self_attn\.(q|kv)_a_layernorm", r"attn_\1_a_norm"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"self_attn\.(q_a|q_b|k_b|v_b|kv_b)_proj", r"attn_\1"),
    (r"mlp\.(gate\.)?(moe_statics\.)?e_score_correction_bias", "exp_probs_b.bias"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    ("self_attn.sinks", "attn_sinks.weight"),
    ("self_attn.gate_proj", "attn_gate"),
    ("input_layernorm", "attn_norm"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    (r"linear_attn\.(conv1d|norm)", r"ssm_\1"),
    ("linear_attn.out_proj", "ssm_out"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"mlp\.shared_experts?\.(\w+)_proj", r"ffn_\1_shexp"),
    (r"mlp\.experts\.(\w+)_proj", r"ffn_\1_exps"),
    (r"mlp\.(gate|router)\.", "ffn_gate_inp."),
    (r"mlp\.(\w+)_proj", r"ffn_\1"),
]
_POST_NORMS = {"post_attention": "post_attention", "post_feedforward": "post_ffw"}
NORMS = {
    "olmo2": _POST_NORMS,
    "glm4": {"post_attention": "ffn", "post_self_attn": "post_attention", "post_mlp": "post_ffw"},
    "exaone4": _POST_NORMS,
    "muse-glimmer": {"post_attention": "post_attention", "pre_feedforward": "ffn", "post_feedforward": "post_ffw"},
    "gemma2": {"post_attention": "post_attention", "pre_feedforward": "ffn", "post_feedforward": "post_ffw"},
    "gemma3": {"post_attention": "post_attention", "pre_feedforward": "ffn", "post_feedforward": "post_ffw"},
    "gemma4": {"post_attention": "post_attention", "pre_feedforward": "ffn", "post_feedforward": "post_ffw"},
    **{
        key: {"post_attention": "post_attention"}
        for key in ("glm4moe", "gpt-oss", "qwen3next", "qwen35", "qwen35moe", "seed_oss")
    },
}


def write_model(
    path: Path,
    config: PreTrainedConfig,
    state: dict[str, Tensor],
    keys: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write the model as a GGUF file in float32 and return `path`.

    Args:
        keys: called last; may add metadata or replace metadata of the model.
    """
    architecture = ARCHITECTURES[config.model_type]
    if architecture == "nemotron_h" and "moe" in config.layers_block_type:
        architecture = "nemotron_h_moe"
    writer = gguf.GGUFWriter(path, architecture)
    write_keys(writer, config)
    keys(writer)
    for name, tensor in (*converted(architecture, config, state), *rope_factors(config)):
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    stated = config.to_dict()

    def add(method: Callable[[object], None], *keys: str) -> None:
        values = [stated[key] for key in keys if stated.get(key) is not None]
        if values:
            method(values[0])

    writer.add_block_count(config.num_hidden_layers)
    add(writer.add_context_length, "max_position_embeddings")
    add(writer.add_embedding_length, "hidden_size")
    add(writer.add_feed_forward_length, "intermediate_size")
    add(writer.add_head_count, "num_attention_heads")
    add(writer.add_head_count_kv, "num_key_value_heads")
    add(writer.add_key_length, "head_dim")
    add(writer.add_value_length, "head_dim")
    add(writer.add_layer_norm_rms_eps, "rms_norm_eps", "norm_eps")
    add(writer.add_layer_norm_eps, "layer_norm_eps", "layer_norm_epsilon")
    add(writer.add_expert_count, "num_local_experts", "num_experts")
    add(writer.add_expert_used_count, "num_experts_per_tok")
    add(writer.add_expert_feed_forward_length, "moe_intermediate_size")
    add(writer.add_expert_shared_feed_forward_length, "shared_expert_intermediate_size", "shared_intermediate_size")
    if writer.arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if writer.arch in GRANITE:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if writer.arch in ("glm4moe", "deepseek2"):
        add(writer.add_expert_count, "n_routed_experts")
        add(writer.add_expert_shared_count, "n_shared_experts")
        add(writer.add_expert_group_count, "n_group")
        add(writer.add_expert_group_used_count, "topk_group")
        add(writer.add_expert_weights_scale, "routed_scaling_factor")
        add(writer.add_expert_weights_norm, "norm_topk_prob")
        add(writer.add_leading_dense_block_count, "first_k_dense_replace")
        softmax = config.model_type == "deepseek_v2"
        function = gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID
        writer.add_expert_gating_func(function)
    if writer.arch == "ernie4_5-moe":
        add(writer.add_expert_count, "moe_num_experts")
        add(writer.add_expert_used_count, "moe_k")
        add(writer.add_interleave_moe_layer_step, "moe_layer_interval")
        add(writer.add_leading_dense_block_count, "moe_layer_start_index")
        add(writer.add_expert_shared_count, "moe_num_shared_experts")
        writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)
    if writer.arch == "minimax-m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if writer.arch == "deepseek2":
        writer.add_leading_dense_block_count(stated.get("first_k_dense_replace", 1))
        writer.add_head_count_kv(1)
        add(writer.add_q_lora_rank, "q_lora_rank")
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        if "mscale_all_dim" in stated["rope_parameters"]:
            writer.add_rope_scaling_yarn_log_mul(0.1 * stated["rope_parameters"]["mscale_all_dim"])
    if writer.arch == "granitehybrid":
        kinds = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * kind for kind in kinds])
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if writer.arch.startswith("nemotron_h"):
        kinds = config.layers_block_type
        writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)  # without effect
        moe = "moe" in kinds
        width = config.moe_intermediate_size if moe else config.intermediate_size
        writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in kinds])
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_state_size(config.ssm_state_size)
        writer.add_ssm_group_count(config.n_groups)
        writer.add_ssm_time_step_rank(config.mamba_num_heads)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
        if moe:
            writer.add_expert_count(config.n_routed_experts)
            writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
            writer.add_expert_shared_count(config.n_shared_experts)
            writer.add_expert_weights_norm(config.norm_topk_prob)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_group_count(config.n_group)
            if config.moe_latent_size is not None:
                writer.add_moe_latent_size(config.moe_latent_size)
        return
    if writer.arch == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if writer.arch in ("lfm2", "lfm2moe"):
        assert not stated.get("block_auto_adjust_ff_dim")
        kinds = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * kind for kind in kinds])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if writer.arch == "muse-glimmer":
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_logit_scale(config.output_multiplier)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if writer.arch in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if writer.arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if writer.arch in ("cohere2", "gpt-oss", "gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if writer.arch in ("olmo2", "exaone4", "granite_swa") and stated.get("sliding_window"):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if writer.arch == "granite_swa":
        writer.add_array("granite_swa.attention.rope_pattern", [theta != 0 for theta in config.layer_rope_theta])
    if writer.arch == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        if stated["rope_parameters"]["rope_type"] == "longrope":
            ratio = config.max_position_embeddings / config.original_max_position_embeddings
            writer.add_rope_scaling_attn_factors((1 + log(ratio) / log(config.original_max_position_embeddings)) ** 0.5)
    if writer.arch == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
    if writer.arch == "gemma4":
        write_gemma4_keys(writer, config)
    if "linear_conv_kernel_dim" in stated:
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        recurrent = [kind == "linear_attention" for kind in config.layer_types]
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    rope = stated["rope_parameters"]
    if "sliding_attention" in rope:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if "partial_rotary_factor" in rope and writer.arch not in ("deepseek2", "gemma4"):
        head_dim = stated.get("head_dim") or config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if writer.arch == "mistral3":
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def write_gemma4_keys(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    stated, sliding = config.to_dict(), [kind == "sliding_attention" for kind in config.layer_types]
    full = {**stated, **next(iter(stated["per_layer_config"].values()))}
    shared = config.num_kv_shared_layers
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(sliding)
    for add, dim in (
        (writer.add_key_length, full["head_dim"]),
        (writer.add_value_length, full["head_dim"]),
        (writer.add_key_length_swa, stated["head_dim"]),
        (writer.add_value_length_swa, stated["head_dim"]),
        (writer.add_rope_dimension_count, full["head_dim"]),
        (writer.add_rope_dimension_count_swa, stated["head_dim"]),
    ):
        add(dim)
    if config.use_double_wide_mlp:
        width, own = config.intermediate_size, config.num_hidden_layers - shared
        writer.add_feed_forward_length([width] * own + [2 * width] * shared)
    writer.add_head_count_kv([(stated if window else full)["num_key_value_heads"] for window in sliding])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_used_count(config.top_k_experts)


def converted(architecture: str, config: PreTrainedConfig, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, stored in state.items():
        for full_name, tensor in split(architecture, config, name, stored):
            short = full_name
            for old, new in NORMS.get(architecture, {"post_attention": "ffn"}).items():
                short = short.replace(f"{old}_layernorm", f"{new}_norm")
            for pattern, replacement in NAMES:
                short = re.sub(pattern, replacement, short)
            yield short, changed(architecture, config, full_name, tensor)


def rope_factors(config: PreTrainedConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the converters of Gemma 4 and Phi-3 add."""
    if config.model_type == "phi3" and config.rope_parameters["rope_type"] == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(config.rope_parameters[f"{kind}_factor"])
    if config.model_type == "gemma4_text":
        half = next(iter(config.to_dict()["per_layer_config"].values()))["head_dim"] // 2
        rotated = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
        yield "rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (half - rotated))


def split(architecture: str, config: PreTrainedConfig, name: str, stored: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a Hugging Face tensor becomes before renaming, with their names.

    Fused tensors are split, and the tensors of experts get names that end in `weight` or `bias`.
    """
    stem, _, last = name.rpartition(".")
    if name.endswith("in_proj_qkvz.weight"):
        value_rows = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
        groups = stored.view(config.linear_num_key_heads, -1, stored.shape[1])
        *qkv, z = groups.split([config.linear_key_head_dim] * 2 + [value_rows] * 2, dim=1)
        yield name.replace("qkvz", "qkv"), torch.cat([tensor.flatten(0, 1) for tensor in qkv])
        yield name.replace("qkvz", "z"), z.flatten(0, 1)
    elif ".shared_mlp." in name:
        prefix = f"{name.partition('shared_mlp')[0]}{'shared_mlp' if config.num_local_experts else 'mlp'}"
        names = ("gate", "up") if "input_linear" in name else ("down",)
        for projection, rows in zip(names, stored.chunk(len(names)), strict=True):
            yield f"{prefix}.{projection}_proj.weight", rows
    elif name.endswith("kv_b_proj.weight"):
        heads = stored.view(config.num_attention_heads, -1, stored.shape[1])
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), values
    elif not re.search(r"(?:\d|mlp|feed_forward|mixer|block_sparse_moe)\.experts$", stem):
        yield name, stored
    elif architecture == "gpt-oss":
        kind = "bias" if last.endswith("_bias") else "weight"
        rows = stored if kind == "bias" else stored.transpose(1, 2)
        if last.startswith("gate_up"):
            yield f"{stem}.gate_proj.{kind}", rows[:, 0::2]
            yield f"{stem}.up_proj.{kind}", rows[:, 1::2]
        else:
            yield f"{stem}.down_proj.{kind}", rows
    elif last == "gate_up_proj" and architecture != "gemma4":
        for projection, rows in zip(("gate", "up"), stored.chunk(2, dim=1), strict=True):
            yield f"{stem}.{projection}_proj.weight", rows
    else:
        yield f"{name}.weight", stored


def changed(architecture: str, config: PreTrainedConfig, name: str, tensor: Tensor) -> Tensor:
    if architecture in INTERLEAVED and re.search("[qk]_proj", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if architecture.startswith("qwen35") and "linear_attn" in name:
        tensor = interleaved_value_heads(config, name, tensor)
    if name.endswith("A_log"):
        return -tensor.exp() if "linear_attn" in name else -tensor.exp()[:, None]
    if name.endswith(".D"):
        return tensor[:, None]
    if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        return tensor.view(config.n_groups if "mixer" in name else config.mamba_n_groups, -1)
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return tensor.squeeze(1)
    if architecture == "muse-glimmer" and name.endswith("layernorm.weight"):
        return tensor + 1
    shifted = ("gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
    if architecture in shifted and name.endswith("norm.weight"):
        return tensor if name.endswith("linear_attn.norm.weight") else tensor + 1
    return tensor[0] if name.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")) else tensor


def interleaved_value_heads(config: PreTrainedConfig, name: str, tensor: Tensor) -> Tensor:
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    if name.endswith("out_proj.weight"):
        return tensor.view(len(tensor), keys, heads // keys, -1).transpose(1, 2).reshape(tensor.shape)
    if name.endswith("linear_attn.norm.weight"):
        return tensor
    start = len(tensor) - (values if re.search(r"in_proj_(qkv|z)|conv1d", name) else heads)
    rows = tensor[start:]
    moved = rows.view(keys, heads // keys, -1).transpose(0, 1).reshape(rows.shape)
    return torch.cat((tensor[:start], moved))
