"""Map the tensor names of GGUF files to Hugging Face's names, for each supported architecture.

This module does not import torch.
"""

import re
from collections.abc import Mapping

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    "rope_freqs.weight": "rope_freqs.weight",
}
_HEAD_BIAS, _WITH_HEAD_BIAS = "output.bias", {"qwen2"}  # as in llama.cpp
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_LINEAR = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_NORM = {"ffn_norm": "post_attention_layernorm"}
_LATER_NORM = {"post_attention_norm": "post_attention_layernorm"}
_FOUR_NORMS = {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm", **_LATER_NORM}
_GPT_OSS = {"ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"}

# Names of a layer's tensors by architecture, without `.weight` or `.bias` if both names have the same suffix.
_LAYER: dict[str, Mapping[str, str]] = {
    "llama": _ATTENTION | _NORM | _DENSE,
    "qwen2": _ATTENTION | _NORM | _DENSE,
    "qwen3": _ATTENTION | _NORM | _DENSE,
    "qwen3moe": _ATTENTION | _NORM | _EXPERTS,
    "qwen3next": _ATTENTION | _LATER_NORM | _EXPERTS | _LINEAR,
    "qwen35": _ATTENTION | _LATER_NORM | _DENSE | _LINEAR,
    "qwen35moe": _ATTENTION | _LATER_NORM | _EXPERTS | _LINEAR,
    "gemma3": _ATTENTION | _FOUR_NORMS | _DENSE,
    "gpt-oss": _ATTENTION | _LATER_NORM | _EXPERTS | _GPT_OSS,
}
_NAME = re.compile(r"blk\.(?P<layer>0|[1-9]\d{0,5})\.(?P<stem>\w+)(?P<kind>\.weight|\.bias)?", re.ASCII)


_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.", re.ASCII)


def layer_of(name: str) -> int | None:
    """Return the index of the layer that the GGUF tensor `name` belongs to, or None if it belongs to no layer."""
    match = _BLOCK.match(name)
    return None if match is None else int(match[1])


def hugging_face_name(architecture: str, name: str, layers: int) -> str | None:
    """Return the Hugging Face name of the GGUF tensor `name`, or None if the tensor has no Hugging Face name.

    The result is the tensor's name in a text-only model of transformers, with two exceptions:

    * The experts of a layer are three tensors for gate, up and down, such as `mlp.experts.gate_proj.weight`. Each
      tensor has the shape [E, N, K] for E experts with N outputs and K inputs, and may have a bias [E, N].
    * The frequency factors of the rotary embedding keep their GGUF name `rope_freqs.weight`.

    Args:
        architecture: an architecture that `gguf_config` supports.
        name: name of the tensor in the GGUF file.
        layers: number of layers of the model. Tensors of later layers have no Hugging Face name.
    """
    match = _NAME.fullmatch(name)
    if match is None or int(match["layer"]) >= layers:
        return _GLOBAL.get(name) if name != _HEAD_BIAS or architecture in _WITH_HEAD_BIAS else None
    names, stem, kind = _LAYER[architecture], match["stem"], match["kind"] or ""
    module = names.get(stem + kind)
    if module is None and stem in names and kind:
        module = names[stem] + kind
    return None if module is None else f"model.layers.{match['layer']}.{module}"
