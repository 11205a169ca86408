"""Convert GGUF models to Hugging Face's names and layout of tensors.

If the file has rows or columns in another order, the conversion returns their numbers in the file. A rank can then read
only its part of a tensor. The conversions undo the changes that llama.cpp's converters make: `conversion/llama.py`,
`gemma.py` and `qwen.py`.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from helexa.core.errors import ModelFileError
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.gguf.config import INTERLEAVED
from helexa.neuron.weights.quantized_matrix import Weight

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    "rope_freqs.weight": "rope_freqs.weight",
    "rope_factors_long.weight": "rope_factors_long.weight",
    "rope_factors_short.weight": "rope_factors_short.weight",
}
_LFM2_NORM = {"token_embd_norm.weight": "model.embedding_norm.weight"}
_NEMOTRON_GLOBAL = {"token_embd.weight": "model.embeddings.weight", "output_norm.weight": "model.norm_f.weight"}
_OTHER_GLOBAL = {
    "lfm2": _LFM2_NORM,
    "lfm2moe": _LFM2_NORM,
    "gemma4": {
        "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    },
    "nemotron_h": _NEMOTRON_GLOBAL,
    "nemotron_h_moe": _NEMOTRON_GLOBAL,
}
# The bias of the output head, and the architectures whose models use it, as in llama.cpp.
_HEAD_BIAS, _WITH_HEAD_BIAS = "output.bias", {"qwen2"}
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
    "ssm_dt": "linear_attn.dt_bias",  # in files of Ollama's converter
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_NORM = {"ffn_norm": "post_attention_layernorm"}
_LATER_NORM = {"post_attention_norm": "post_attention_layernorm"}
_FOUR_NORMS = {"ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm", **_LATER_NORM}
_POST_NORMS = {"post_ffw_norm": "post_feedforward_layernorm", **_LATER_NORM}
_GLM4 = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_MOE = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.w1",
    "ffn_up_exps": "feed_forward.experts.w3",
    "ffn_down_exps": "feed_forward.experts.w2",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_LATENT_ATTENTION = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # only in older files, instead of the next two tensors
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_GEMMA4 = {
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_MAMBA = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj",
    **{f"ffn_{name}{kind}": f"shared_mlp.{name}_proj" for name in ("gate", "up", "down") for kind in ("", "_shexp")},
}
_GRANITE_HYBRID = {stem: f"mamba.{name}" for stem, name in _MAMBA.items()} | _GRANITE_MOE
_NEMOTRON = {stem: f"mixer.{name}" for stem, name in _MAMBA.items()} | {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
_MINIMAX = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
    "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
}
_GPT_OSS = {"ffn_gate_inp": "mlp.router", "attn_sinks.weight": "self_attn.sinks"}

# For each architecture: Hugging Face names of a layer's tensors by GGUF name. The names omit `.weight` and `.bias` if
# both names end with the same suffix.
_LAYER: dict[str, Mapping[str, str]] = {
    "llama": _ATTENTION | _NORM | _DENSE,
    "mistral3": _ATTENTION | _NORM | _DENSE,
    "granite": _ATTENTION | _NORM | _DENSE,
    "granitemoe": _ATTENTION | _NORM | _GRANITE_MOE,
    "granite_swa": _ATTENTION | {"attn_sinks.weight": "self_attn.sinks"} | _NORM | _DENSE,
    "smollm3": _ATTENTION | _NORM | _DENSE,
    "olmo2": _ATTENTION | _POST_NORMS | _DENSE,
    "olmoe": _ATTENTION | _NORM | _EXPERTS,
    "exaone4": _ATTENTION | _POST_NORMS | _DENSE,
    "ernie4_5": _ATTENTION | _NORM | _DENSE,
    "hunyuan-dense": _ATTENTION | _HUNYUAN | _NORM | _DENSE,
    "phi3": _ATTENTION | _NORM | _DENSE | _FUSED,
    "stablelm": _ATTENTION | _NORM | _DENSE,
    "command-r": _ATTENTION | _DENSE,
    "cohere2": _ATTENTION | _DENSE,
    "seed_oss": _ATTENTION | _LATER_NORM | _DENSE,
    "arcee": _ATTENTION | _NORM | _DENSE,
    "qwen2": _ATTENTION | _NORM | _DENSE,
    "qwen3": _ATTENTION | _NORM | _DENSE,
    "qwen3moe": _ATTENTION | _NORM | _EXPERTS,
    "qwen3next": _ATTENTION | _LATER_NORM | _EXPERTS | _LINEAR,
    "qwen35": _ATTENTION | _LATER_NORM | _DENSE | _LINEAR,
    "qwen35moe": _ATTENTION | _LATER_NORM | _EXPERTS | _LINEAR,
    "lfm2": _ATTENTION | _LFM2,
    "lfm2moe": _ATTENTION | _LFM2 | _LFM2_MOE,
    "glm4": _ATTENTION | _NORM | _GLM4 | _DENSE | _FUSED,
    "glm4moe": _ATTENTION | _LATER_NORM | _DENSE | _EXPERTS | _SHARED_EXPERTS,
    "ernie4_5-moe": _ATTENTION
    | _NORM
    | _DENSE
    | _EXPERTS
    | _SHARED_EXPERTS
    | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    "minimax-m2": _ATTENTION | _NORM | _MINIMAX,
    "deepseek2": _ATTENTION | _LATENT_ATTENTION | _NORM | _DENSE | _EXPERTS | _SHARED_EXPERTS,
    "granitehybrid": _ATTENTION | _NORM | _GRANITE_HYBRID,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "muse-glimmer": _ATTENTION | _FOUR_NORMS | _DENSE | {"attn_gate": "self_attn.gate_proj"},
    "gemma": _ATTENTION | _NORM | _DENSE,
    "gemma2": _ATTENTION | _FOUR_NORMS | _DENSE,
    "gemma3": _ATTENTION | _FOUR_NORMS | _DENSE,
    "gemma4": _ATTENTION | _FOUR_NORMS | _DENSE | _GEMMA4,
    "gpt-oss": _ATTENTION | _LATER_NORM | _EXPERTS | _GPT_OSS,
}
_NAME = re.compile(r"blk\.(?P<layer>0|[1-9]\d{0,5})\.(?P<stem>[\w.]+?)(?P<kind>\.weight|\.bias)?", re.ASCII)

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.", re.ASCII)

_ROUND_ROBIN_HEADS = {"qwen35", "qwen35moe"}
_SHIFTED_NORMS = {"gemma", "gemma2", "gemma3", "qwen3next", *_ROUND_ROBIN_HEADS}
_FLAT = re.compile(r"\.(?:mixer|mamba)\.(?:A_log|D|norm\.weight)$")  # vectors that are matrices in the file
_LAYER_PREFIX = re.compile(r"model\.layers\.\d+\.", re.ASCII)


def layer_of(name: str) -> int | None:
    """Return the layer index of the GGUF tensor `name`; None if it is in no layer."""
    match = _BLOCK.match(name)
    return None if match is None else int(match[1])


def hugging_face_name(architecture: str, name: str, layers: int) -> str | None:
    """Return the Hugging Face name of the GGUF tensor `name`; None if it has none.

    The result is the tensor's name in a text-only model of transformers, with three exceptions:

    * Latent attention may have separate tensors for keys and values: `self_attn.k_b_proj.weight` [heads, L, K] and
      `self_attn.v_b_proj.weight` [heads, N, L]. L, K and N are the widths of the latent, of a key and of a value.
    * The experts of a layer are three tensors for gate, up and down, such as `mlp.experts.gate_proj.weight`. Each
      tensor has the shape [E, N, K] for E experts with N outputs and K inputs, and may have a bias [E, N].
    * The frequency factors of the rotary embedding keep their GGUF names, such as `rope_freqs.weight`.

    Args:
        architecture: an architecture that `gguf_config` supports.
        name: name of the tensor in the GGUF file.
        layers: number of layers of the model. Tensors of later layers have no Hugging Face name.
    """
    match = _NAME.fullmatch(name)
    if match is None or int(match["layer"]) >= layers:
        if name == _HEAD_BIAS and architecture not in _WITH_HEAD_BIAS:
            return None
        return _OTHER_GLOBAL.get(architecture, {}).get(name) or _GLOBAL.get(name)
    names, stem, kind = _LAYER[architecture], match["stem"], match["kind"] or ""
    module = names.get(stem + kind)
    if module is None and stem in names and kind:
        module = names[stem] + kind
    return None if module is None else f"model.layers.{match['layer']}.{module}"


class GgufLayout:
    """Converts the tensors of one GGUF model to Hugging Face's layout.

    GGUF files differ from Hugging Face's checkpoints in the following ways:

    * llama, arcee, mistral3, muse-glimmer, nemotron_h, smollm3 and the Granite models: the rows of q and k are
      interleaved in pairs for ggml's rotary embedding.
    * gemma, gemma2, gemma3, qwen3next, qwen35, qwen35moe: the weights of norms are stored as `1 + w`, except the norm
      inside linear attention. muse-glimmer: only the norms before and after attention and feed-forward layer.
    * Linear attention, Mamba-2: `A_log` is stored as `-exp(A_log)`.
    * Mamba-2: `A_log` and `D` are matrices with one column, and the norm has one row per group.
    * Linear attention, Mamba-2, lfm2: the convolution weight lacks the middle dimension of size 1.
    * qwen35, qwen35moe: value heads are ordered round-robin over the key heads. Hugging Face groups them by key head.
    * The gate of a shared expert, and in ernie4_5-moe the bias of the choice of experts, may be a vector [columns]
      instead of a matrix [1, columns].

    Args:
        architecture: architecture of the GGUF file.
        config: configuration from `gguf_config`.
    """

    def __init__(self, architecture: str, config: Mapping[str, Any]) -> None:
        self._shifted_norms = "norm.weight" if architecture in _SHIFTED_NORMS else None
        if architecture == "muse-glimmer":  # the final norm, and the norms of queries and keys are not shifted
            self._shifted_norms = "layernorm.weight"
        self._interleaved_heads: dict[str, int] = {}
        if architecture in INTERLEAVED:
            self._interleaved_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._value_heads = _ValueHeads(config) if architecture in _ROUND_ROBIN_HEADS else None

    def shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return tensor `name`'s Hugging Face shape; `stored` is its shape in the file."""
        if name.endswith((".conv1d.weight", ".conv.conv.weight")) and len(stored) == 2:
            return (stored[0], 1, stored[1])
        if len(stored) == 2 and _FLAT.search(name):
            return (stored[0] * stored[1],)
        vectors = (".mlp.shared_expert_gate.weight", ".mlp.moe_statics.e_score_correction_bias")
        if name.endswith(vectors) and len(stored) == 1:
            return (1, *stored)
        return stored

    def rows(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        """Return the row numbers in the file of tensor `name`, in Hugging Face's order.

        Args:
            shape: shape of the tensor in Hugging Face's layout.

        Returns:
            int64, the numbers of all rows; None if the file has the rows in Hugging Face's order.

        Raises:
            ModelFileError: the number of rows does not match the configuration.
        """
        module, _, rest = _LAYER_PREFIX.sub("", name).partition(".")
        projection = rest.partition(".")[0]
        if module in ("self_attn", "mixer") and projection in self._interleaved_heads:
            return halves(name, shape[0], self._interleaved_heads[projection])
        if module == "linear_attn" and self._value_heads is not None:
            return self._value_heads.rows(name, rest, shape[0])
        return None

    def columns(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        """Return the column numbers in the file of tensor `name` (see `rows`)."""
        if self._value_heads is not None and _LAYER_PREFIX.sub("", name) == "linear_attn.out_proj.weight":
            return self._value_heads.columns(name, shape[-1])
        return None

    def restore(self, name: str, weight: Weight) -> Weight:
        """Convert the values of tensor `name`, or of a part, to Hugging Face's values."""
        local_name = _LAYER_PREFIX.sub("", name)
        shifted = self._shifted_norms is not None and local_name.endswith(self._shifted_norms)
        if shifted and local_name != "linear_attn.norm.weight":
            return _dequantized(weight) - 1
        # The logarithm is computed in float64, so that the float32 result is rounded only once.
        return _dequantized(weight).double().neg().log().float() if local_name.endswith(".A_log") else weight


class _ValueHeads:
    """The order of value heads in the tensors of linear attention.

    Several value heads share a key head. GGUF orders value heads by their number within the key head: (k0 v0, k1 v0,
    .., k0 v1, k1 v1, ..). Hugging Face orders them by key head: (k0 v0, k0 v1, .., k1 v0, k1 v1, ..).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        keys, self._count = config["linear_num_key_heads"], config["linear_num_value_heads"]
        if self._count % keys:
            raise ModelFileError(
                f"linear attention has {self._count} value heads, expected a multiple of its {keys} key heads"
            )
        self._keys, self._width = keys, config["linear_value_head_dim"]
        start = 2 * keys * config["linear_key_head_dim"]
        self._rows = {  # per tensor: rows before the value heads, rows per head
            "in_proj_qkv.weight": (start, self._width),
            "in_proj_z.weight": (0, self._width),
            "in_proj_a.weight": (0, 1),
            "in_proj_b.weight": (0, 1),
            "conv1d.weight": (start, self._width),
            "A_log": (0, 1),
            "dt_bias": (0, 1),
        }

    def rows(self, name: str, local_name: str, count: int) -> NDArray[np.int64] | None:
        """Return the rows of all heads in Hugging Face's order (see `GgufLayout.rows`)."""
        if self._count == self._keys or local_name not in self._rows:
            return None
        start, width = self._rows[local_name]
        if count != start + self._count * width:
            raise ModelFileError(f"tensor {name} has {count} rows, which do not match {self._count} value heads")
        return np.concatenate((np.arange(start), self._order(start, width)))

    def columns(self, name: str, count: int) -> NDArray[np.int64] | None:
        """Return all heads' columns in Hugging Face's order (see `GgufLayout.columns`)."""
        if self._count == self._keys:
            return None
        if count != self._count * self._width:
            raise ModelFileError(f"tensor {name} has {count} columns, which do not match {self._count} value heads")
        return self._order(0, self._width)

    def _order(self, start: int, width: int) -> NDArray[np.int64]:
        numbers = np.arange(start, start + self._count * width)
        return numbers.reshape(-1, self._keys, width).swapaxes(0, 1).ravel()


def halves(name: str, count: int, heads: int) -> NDArray[np.int64]:
    """Return row numbers that undo GGUF's interleaving of the halves of each head.

    `count` is the number of rows of the tensor `name`. A ModelFileError is raised if `count` does not fit `heads`.
    """
    if count % (2 * heads):
        raise ModelFileError(f"tensor {name} has {count} rows, which do not divide into {heads} heads of an even width")
    # GGUF stores the 2h rows of a head as (0, h, 1, h + 1, ..).
    return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _dequantized(weight: Weight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize()
