"""Convert tiny Hugging Face models to GGUF files, following the rules of llama.cpp's converter."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedConfig

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}
NAMES = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    (r"model\.layers", "blk"),
    ("self_attn.o_proj", "attn_output"),
    (r"self_attn\.([qkv])_proj", r"attn_\1"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    ("self_attn.sinks", "attn_sinks.weight"),
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
    (r"mlp\.shared_expert\.(\w+)_proj", r"ffn_\1_shexp"),
    (r"mlp\.experts\.(\w+)_proj", r"ffn_\1_exps"),
    (r"mlp\.(gate|router)\.", "ffn_gate_inp."),
    (r"mlp\.(\w+)_proj", r"ffn_\1"),
]
NORMS = {
    "gemma3": {"post_attention": "post_attention", "pre_feedforward": "ffn", "post_feedforward": "post_ffw"},
    **{key: {"post_attention": "post_attention"} for key in ("gpt-oss", "qwen3next", "qwen35", "qwen35moe")},
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
    writer = gguf.GGUFWriter(path, architecture)
    write_keys(writer, config)
    keys(writer)
    for name, tensor in converted(architecture, config, state):
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

    add(writer.add_block_count, "num_hidden_layers")
    add(writer.add_context_length, "max_position_embeddings")
    add(writer.add_embedding_length, "hidden_size")
    add(writer.add_feed_forward_length, "intermediate_size")
    add(writer.add_head_count, "num_attention_heads")
    add(writer.add_head_count_kv, "num_key_value_heads")
    add(writer.add_key_length, "head_dim")
    add(writer.add_value_length, "head_dim")
    add(writer.add_layer_norm_rms_eps, "rms_norm_eps")
    add(writer.add_expert_count, "num_local_experts", "num_experts")
    add(writer.add_expert_used_count, "num_experts_per_tok")
    add(writer.add_expert_feed_forward_length, "moe_intermediate_size")
    add(writer.add_expert_shared_feed_forward_length, "shared_expert_intermediate_size")
    if writer.arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if writer.arch in ("gpt-oss", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
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
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def converted(architecture: str, config: PreTrainedConfig, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, stored in state.items():
        for full_name, tensor in split(architecture, config, name, stored):
            short = full_name
            for old, new in NORMS.get(architecture, {"post_attention": "ffn"}).items():
                short = short.replace(f"{old}_layernorm", f"{new}_norm")
            for pattern, replacement in NAMES:
                short = re.sub(pattern, replacement, short)
            yield short, changed(architecture, config, full_name, tensor)


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
    elif not stem.endswith("mlp.experts"):
        yield name, stored
    elif architecture == "gpt-oss":
        kind = "bias" if last.endswith("_bias") else "weight"
        rows = stored if kind == "bias" else stored.transpose(1, 2)
        if last.startswith("gate_up"):
            yield f"{stem}.gate_proj.{kind}", rows[:, 0::2]
            yield f"{stem}.up_proj.{kind}", rows[:, 1::2]
        else:
            yield f"{stem}.down_proj.{kind}", rows
    elif last == "gate_up_proj":
        for projection, rows in zip(("gate", "up"), stored.chunk(2, dim=1), strict=True):
            yield f"{stem}.{projection}_proj.weight", rows
    else:
        yield f"{name}.weight", stored


def changed(architecture: str, config: PreTrainedConfig, name: str, tensor: Tensor) -> Tensor:
    if architecture == "llama" and re.search("[qk]_proj", name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if architecture.startswith("qwen35") and "linear_attn" in name:
        tensor = interleaved_value_heads(config, name, tensor)
    if name.endswith("A_log"):
        return -tensor.exp()
    if name.endswith("conv1d.weight"):
        return tensor.squeeze(1)
    if architecture in ("gemma3", "qwen3next", "qwen35", "qwen35moe") and name.endswith("norm.weight"):
        return tensor if name.endswith("linear_attn.norm.weight") else tensor + 1
    return tensor[0] if name.endswith("shared_expert_gate.weight") else tensor


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
