"""Models of real shapes with random weights, made on the spot."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from helexa.neuron.weights.formats import SAMPLE_ROWS

_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "vocab_size": 151936}
_LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def _config(kind: str, hidden: int, layers: int, heads: int, kv_heads: int, dim: int, **more: Any) -> dict[str, Any]:
    return _COMMON | {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        **more,
    }


_EXPERTS = {"num_experts_per_tok": 8, "norm_topk_prob": True}
CONFIGS = {
    "8B": _config("qwen3", 4096, 36, 32, 8, 128, intermediate_size=12288),
    "27B": _config("qwen3_5", 5120, 64, 24, 4, 256, intermediate_size=17408, **_LINEAR, vocab_size=248320),
    "30B-A3B": _config("qwen3_moe", 2048, 48, 32, 4, 128, num_experts=128, moe_intermediate_size=768, **_EXPERTS),
}
"""Qwen3-8B, Qwen3.5-27B (three of four layers are Gated DeltaNets) and Qwen3-30B-A3B."""
_SMALL_LINEAR = {name: 16 if "dim" in name else 2 for name in _LINEAR} | {"linear_conv_kernel_dim": 4}
_FEW = {"vocab_size": 256, "max_position_embeddings": 512}
TINY = {
    "8B": _config("qwen3", 64, 1, 2, 1, 32, intermediate_size=64, **_FEW),
    "27B": _config("qwen3_5", 64, 4, 2, 1, 32, intermediate_size=64, **_SMALL_LINEAR, **_FEW),
    "30B-A3B": _config("qwen3_moe", 64, 1, 2, 1, 32, num_experts=4, moe_intermediate_size=32, **_EXPERTS, **_FEW)
    | {"num_experts_per_tok": 2},
}
"""The same kinds, to see that a script works."""


class MadeModel:
    """A checkpoint (see `weights.checkpoint.Checkpoint`) whose numbers come from one pool: they cost no time."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._shapes = dict(_shapes(config))
        self.total_bytes = 2 * sum(torch.Size(shape).numel() for shape in self._shapes.values())
        largest = max(torch.Size(shape).numel() for shape in self._shapes.values())
        generator = torch.Generator().manual_seed(1)
        part = torch.randn(min(largest, 1 << 24), generator=generator).mul_(0.02).to(torch.bfloat16)
        self._pool = part.repeat(-(-largest // len(part)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def names(self) -> list[str]:
        """See `Checkpoint`."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        return self._shapes[name]

    def read(self, name: str, index: int | None = None) -> Tensor:
        """See `Checkpoint`."""
        shape = self._shapes[name] if index is None else self._shapes[name][1:]
        numbers = self._pool[: torch.Size(shape).numel()].view(shape)
        return numbers + 1 if "norm" in name else numbers

    def kind(self, name: str) -> str:
        """See `Checkpoint`."""
        return "bfloat16"

    def sample(self, name: str, columns: int) -> Tensor:
        """See `Checkpoint`."""
        return torch.zeros(SAMPLE_ROWS, columns, dtype=torch.bfloat16)

    def close(self) -> None:
        """See `Checkpoint`."""

    def write(self, folder: Path) -> None:
        """As a Hugging Face folder, a file for each layer and one for the rest."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        files: dict[str, list[str]] = {}
        for name in self._shapes:
            layer = name.split(".")[2] if ".layers." in name else "rest"
            files.setdefault(f"model-{layer}.safetensors", []).append(name)
        for file, names in files.items():
            save_file({name: self.read(name).clone() for name in names}, folder / file)
        index = {name: file for file, names in files.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocabulary, dim = config["hidden_size"], config["vocab_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "lm_head.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    hybrid = config["model_type"] == "qwen3_5"
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if hybrid and (layer + 1) % 4:
            yield from _linear_attention(config, f"{prefix}.linear_attn", hidden)
        else:
            attention = f"{prefix}.self_attn"
            yield f"{attention}.q_proj.weight", (queries * (2 if hybrid else 1), hidden)
            yield f"{attention}.k_proj.weight", (keys, hidden)
            yield f"{attention}.v_proj.weight", (keys, hidden)
            yield f"{attention}.o_proj.weight", (hidden, queries)
            yield f"{attention}.q_norm.weight", (dim,)
            yield f"{attention}.k_norm.weight", (dim,)
        if "num_experts" in config:
            experts, width = config["num_experts"], config["moe_intermediate_size"]
            yield f"{prefix}.mlp.gate.weight", (experts, hidden)
            yield f"{prefix}.mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
            yield f"{prefix}.mlp.experts.down_proj", (experts, hidden, width)
        else:
            width = config["intermediate_size"]
            yield f"{prefix}.mlp.gate_proj.weight", (width, hidden)
            yield f"{prefix}.mlp.up_proj.weight", (width, hidden)
            yield f"{prefix}.mlp.down_proj.weight", (hidden, width)


def _linear_attention(config: dict[str, Any], prefix: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads, dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    mixed = 2 * keys + heads * dim
    yield f"{prefix}.in_proj_qkv.weight", (mixed, hidden)
    yield f"{prefix}.in_proj_z.weight", (heads * dim, hidden)
    yield f"{prefix}.in_proj_b.weight", (heads, hidden)
    yield f"{prefix}.in_proj_a.weight", (heads, hidden)
    yield f"{prefix}.conv1d.weight", (mixed, 1, config["linear_conv_kernel_dim"])
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.norm.weight", (dim,)
    yield f"{prefix}.out_proj.weight", (hidden, heads * dim)
