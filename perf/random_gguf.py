"""Write a GGUF file with random quantized weights, to compare an architecture with llama.cpp (`perf/compare.py`).

usage: python perf/random_gguf.py SHAPE FILE

SHAPE is one of:
    gemma4    the layers of Gemma 4 E2B, with half of its vocabulary
    lfm2      LFM2-1.2B
    lfm2moe   the layers of LFM2-8B-A1B with 8 of 32 experts, of which a token uses 4
    glm4      10 layers of GLM-4.7-Flash with 32 of 64 experts, of which a token uses 4, and part of its vocabulary
    nemotron  26 of 52 layers of Nemotron-H-4B: 13 Mamba-2, 11 MLPs, 2 attention
    llama     a dense model of 1.2 billion weights, for comparison

All matrices of the layers are Q4_K, or Q5_0 if their width is no multiple of 256. The embedding, which is also the
output matrix, is Q6_K. The files have no vocabulary, only its size.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Kind = gguf.GGMLQuantizationType
Vector = NDArray[np.float32]
_BLOCK = {Kind.Q4_K: (256, 144), Kind.Q5_0: (32, 22), Kind.Q6_K: (256, 210)}  # weights and bytes of a block
_SCALE = {Kind.Q4_K: 1 / 258, Kind.Q5_0: 1 / 9.2, Kind.Q6_K: 1 / 1367}  # makes the deviation of random blocks 1


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file: a matrix of random blocks, or the values of a float32 tensor."""

    name: str
    shape: tuple[int, ...]
    kind: Kind = Kind.Q4_K
    fill: Callable[[np.random.Generator, tuple[int, ...]], NDArray[np.float64]] | None = None


def matrix(name: str, *shape: int, kind: Kind = Kind.Q4_K) -> Tensor:
    """Return a quantized matrix, in Q5_0 if its rows do not divide into blocks of 256."""
    return Tensor(f"{name}.weight", shape, Kind.Q5_0 if shape[-1] % 256 else kind)


def ones(name: str, *shape: int) -> Tensor:
    """Return a float32 tensor of ones."""
    return Tensor(name, shape, Kind.F32, lambda chance, shape: np.ones(shape))


def normal(name: str, *shape: int, scale: float = 0.02, kind: Kind = Kind.F32) -> Tensor:
    """Return a tensor of normally distributed numbers that is not quantized."""
    return Tensor(name, shape, kind, lambda chance, shape: chance.standard_normal(shape) * scale)


def experts(at: str, hidden: int, width: int, count: int, *, gated: bool = True) -> Iterator[Tensor]:
    """Yield router and experts of a layer."""
    yield normal(f"{at}.ffn_gate_inp.weight", count, hidden)
    yield normal(f"{at}.exp_probs_b.bias", count)
    for name in ("gate", "up") if gated else ("up",):
        yield matrix(f"{at}.ffn_{name}_exps", count, width, hidden)
    yield matrix(f"{at}.ffn_down_exps", count, hidden, width)


def mlp(at: str, hidden: int, width: int, suffix: str = "", *, gated: bool = True) -> Iterator[Tensor]:
    """Yield the matrices of an MLP."""
    for name in ("gate", "up") if gated else ("up",):
        yield matrix(f"{at}.ffn_{name}{suffix}", width, hidden)
    yield matrix(f"{at}.ffn_down{suffix}", hidden, width)


def attention(at: str, hidden: int, heads: int, kv_heads: int, dim: int) -> Iterator[Tensor]:
    """Yield the projections of an attention layer; without keys and values if `kv_heads` is 0."""
    yield matrix(f"{at}.attn_q", heads * dim, hidden)
    for name in ("k", "v") if kv_heads else ():
        yield matrix(f"{at}.attn_{name}", kv_heads * dim, hidden)
    yield matrix(f"{at}.attn_output", hidden, heads * dim)


def ends(vocabulary: int, hidden: int, norm: str = "output_norm") -> Iterator[Tensor]:
    """Yield the embedding, which is also the output matrix, and the final norm."""
    yield matrix("token_embd", vocabulary, hidden, kind=Kind.Q6_K)
    yield ones(f"{norm}.weight", hidden)


def common(writer: gguf.GGUFWriter, layers: int, hidden: int, heads: int, vocabulary: int) -> None:
    """Write the metadata that all architectures have."""
    writer.add_string("tokenizer.ggml.model", "none")
    writer.add_block_count(layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(hidden)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(vocabulary)


def gemma4(writer: gguf.GGUFWriter) -> Iterator[Tensor]:
    """Write the metadata, and yield the tensors of the model."""
    layers, hidden, width, heads, vocabulary, narrow, shared = 35, 1536, 6144, 8, 131_072, 256, 20
    window = [index % 5 != 4 for index in range(layers)]
    common(writer, layers, hidden, heads, vocabulary)
    writer.add_head_count_kv(1)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(narrow)
    writer.add_feed_forward_length([width] * (layers - shared) + [2 * width] * shared)
    writer.add_sliding_window(512)
    writer.add_sliding_window_pattern(window)
    writer.add_final_logit_softcapping(30.0)
    writer.add_rope_freq_base(1e6)
    writer.add_float32("gemma4.rope.freq_base_swa", 1e4)
    for full in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        full(512)
    for local in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        local(256)
    yield from ends(vocabulary, hidden)
    yield matrix("per_layer_token_embd", vocabulary, layers * narrow)
    yield normal("per_layer_model_proj.weight", layers * narrow, hidden, kind=Kind.BF16)
    yield ones("per_layer_proj_norm.weight", narrow)
    factors = np.array([1.0] * 64 + [1e30] * 192)
    yield Tensor("rope_freqs.weight", (256,), Kind.F32, lambda chance, shape: factors)
    for layer, local in enumerate(window):
        at, dim, own = f"blk.{layer}", 256 if local else 512, layer < layers - shared
        yield from attention(at, hidden, heads, int(own), dim)
        yield from mlp(at, hidden, width if own else 2 * width)
        for name in ("attn_q_norm", "attn_k_norm") if own else ("attn_q_norm",):
            yield ones(f"{at}.{name}.weight", dim)
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
            yield ones(f"{at}.{name}.weight", hidden)
        yield matrix(f"{at}.inp_gate", narrow, hidden)
        yield matrix(f"{at}.proj", hidden, narrow)
        yield ones(f"{at}.layer_output_scale.weight", 1)


def lfm2(writer: gguf.GGUFWriter) -> Iterator[Tensor]:
    """Write the metadata, and yield the tensors of the model."""
    mixture = writer.arch == "lfm2moe"
    layers, hidden, width, heads, kv_heads, vocabulary = 24 if mixture else 16, 2048, 8192, 32, 8, 65_536
    attending = (2, 6, 10, 14, 18, 21) if mixture else (2, 5, 8, 10, 12, 14)
    common(writer, layers, hidden, heads, vocabulary)
    writer.add_head_count_kv([kv_heads * (layer in attending) for layer in range(layers)])
    writer.add_feed_forward_length(7168 if mixture else width)
    writer.add_rope_freq_base(1e6)
    writer.add_shortconv_l_cache(3)
    if mixture:
        writer.add_leading_dense_block_count(2)
        writer.add_expert_count(8)
        writer.add_expert_used_count(4)
        writer.add_expert_feed_forward_length(1792)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    yield from ends(vocabulary, hidden, "token_embd_norm")
    for layer in range(layers):
        at = f"blk.{layer}"
        yield ones(f"{at}.attn_norm.weight", hidden)
        yield ones(f"{at}.ffn_norm.weight", hidden)
        if mixture and layer >= 2:
            yield from experts(at, hidden, 1792, 8)
        else:
            yield from mlp(at, hidden, 7168 if mixture else width)
        if layer in attending:
            yield from attention(at, hidden, heads, kv_heads, 64)
            yield ones(f"{at}.attn_q_norm.weight", 64)
            yield ones(f"{at}.attn_k_norm.weight", 64)
        else:
            yield normal(f"{at}.shortconv.conv.weight", hidden, 3, scale=0.5)
            yield matrix(f"{at}.shortconv.in_proj", 3 * hidden, hidden)
            yield matrix(f"{at}.shortconv.out_proj", hidden, hidden)


def glm4(writer: gguf.GGUFWriter) -> Iterator[Tensor]:
    """Write the metadata, and yield the tensors of the model."""
    layers, hidden, width, narrow, count, heads, vocabulary = 10, 2048, 10_240, 1536, 32, 20, 65_536
    query_rank, rank, plain, rotated, value = 768, 512, 192, 64, 256
    common(writer, layers, hidden, heads, vocabulary)
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(width)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(rotated)
    writer.add_q_lora_rank(query_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(plain + rotated)
    writer.add_value_length_mla(value)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(count)
    writer.add_expert_used_count(4)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(narrow)
    writer.add_expert_weights_scale(1.8)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    yield from ends(vocabulary, hidden)
    for layer in range(layers):
        at = f"blk.{layer}"
        yield ones(f"{at}.attn_norm.weight", hidden)
        yield ones(f"{at}.ffn_norm.weight", hidden)
        yield matrix(f"{at}.attn_q_a", query_rank, hidden)
        yield ones(f"{at}.attn_q_a_norm.weight", query_rank)
        yield matrix(f"{at}.attn_q_b", heads * (plain + rotated), query_rank)
        yield matrix(f"{at}.attn_kv_a_mqa", rank + rotated, hidden)
        yield ones(f"{at}.attn_kv_a_norm.weight", rank)
        yield matrix(f"{at}.attn_k_b", heads, rank, plain)
        yield matrix(f"{at}.attn_v_b", heads, value, rank)
        yield matrix(f"{at}.attn_output", hidden, heads * value)
        if layer:
            yield from experts(at, hidden, narrow, count)
            yield from mlp(at, hidden, narrow, "_shexp")
        else:
            yield from mlp(at, hidden, width)


def nemotron(writer: gguf.GGUFWriter) -> Iterator[Tensor]:
    """Write the metadata, and yield the tensors of the model."""
    pattern, hidden, width, heads, kv_heads, vocabulary = "M-M-M-M*-M-M-M-M-M*-M-M-M-", 3072, 12_288, 32, 8, 131_072
    scan_heads, scan_dim, groups, state = 112, 64, 8, 128
    inner, mixed = scan_heads * scan_dim, scan_heads * scan_dim + 2 * groups * state
    common(writer, len(pattern), hidden, heads, vocabulary)
    writer.add_layer_norm_eps(1e-5)
    writer.add_head_count_kv([kv_heads * (kind == "*") for kind in pattern])
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_feed_forward_length([width * (kind == "-") for kind in pattern])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(scan_heads)
    writer.add_ssm_inner_size(inner)
    yield from ends(vocabulary, hidden)
    for layer, kind in enumerate(pattern):
        at = f"blk.{layer}"
        yield ones(f"{at}.attn_norm.weight", hidden)
        if kind == "*":
            yield from attention(at, hidden, heads, kv_heads, 128)
        elif kind == "-":
            yield from mlp(at, hidden, width, gated=False)
        else:
            yield matrix(f"{at}.ssm_in", inner + mixed + scan_heads, hidden)
            yield normal(f"{at}.ssm_conv1d.weight", mixed, 4, scale=0.5)
            yield normal(f"{at}.ssm_conv1d.bias", mixed)
            yield normal(f"{at}.ssm_dt.bias", scan_heads)
            yield Tensor(f"{at}.ssm_a", (scan_heads, 1), Kind.F32, lambda chance, shape: -chance.uniform(1, 16, shape))
            yield ones(f"{at}.ssm_d", scan_heads, 1)
            yield ones(f"{at}.ssm_norm.weight", groups, inner // groups)
            yield matrix(f"{at}.ssm_out", hidden, inner)


def llama(writer: gguf.GGUFWriter) -> Iterator[Tensor]:
    """Write the metadata, and yield the tensors of the model."""
    layers, hidden, width, heads, kv_heads, vocabulary = 16, 2048, 8192, 32, 8, 65_536
    common(writer, layers, hidden, heads, vocabulary)
    writer.add_head_count_kv(kv_heads)
    writer.add_feed_forward_length(width)
    writer.add_rope_dimension_count(64)
    yield from ends(vocabulary, hidden)
    for layer in range(layers):
        at = f"blk.{layer}"
        yield ones(f"{at}.attn_norm.weight", hidden)
        yield ones(f"{at}.ffn_norm.weight", hidden)
        yield from attention(at, hidden, heads, kv_heads, 64)
        yield from mlp(at, hidden, width)


SHAPES = {
    "gemma4": ("gemma4", gemma4),
    "lfm2": ("lfm2", lfm2),
    "lfm2moe": ("lfm2moe", lfm2),
    "glm4": ("deepseek2", glm4),
    "nemotron": ("nemotron_h", nemotron),
    "llama": ("llama", llama),
}


def blocks(chance: np.random.Generator, tensor: Tensor) -> NDArray[np.uint8]:
    """Return random blocks, uint8 [rows, bytes], whose weights have a deviation of 1 / sqrt(width)."""
    weights, size = _BLOCK[tensor.kind]
    rows, width = int(np.prod(tensor.shape[:-1])), tensor.shape[-1]
    data = np.frombuffer(chance.bytes(rows * width // weights * size), np.uint8).reshape(-1, size).copy()
    scale = np.float16(_SCALE[tensor.kind] * width**-0.5)
    at = size - 2 if tensor.kind == Kind.Q6_K else 0
    data[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    if tensor.kind == Kind.Q4_K:  # makes the mean of the weights 0
        data[:, 2:4] = np.frombuffer(np.float16(7.5 * scale).tobytes(), np.uint8)
    return data.reshape(*tensor.shape[:-1], -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    architecture, tensors_of = SHAPES[arguments.shape]
    chance = np.random.default_rng(0)
    writer = gguf.GGUFWriter(arguments.file, architecture)
    for tensor in tensors_of(writer):
        if tensor.fill is None:
            writer.add_tensor(tensor.name, blocks(chance, tensor), raw_dtype=tensor.kind)
        elif tensor.kind == Kind.BF16:
            values = tensor.fill(chance, tensor.shape).astype(np.float32).view(np.uint32) >> 16
            writer.add_tensor(tensor.name, values.astype(np.uint16).view(np.uint8), raw_dtype=tensor.kind)
        else:
            writer.add_tensor(tensor.name, tensor.fill(chance, tensor.shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
