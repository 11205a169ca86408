"""Checkpoints with the shapes of real models and random weights."""

import json
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from helexa.neuron.models import model_class
from helexa.neuron.weights.model_file import WHOLE, Part
from helexa.neuron.weights.quantization_formats import QuantPolicy
from helexa.neuron.weights.quantize import quantize
from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor, Weight

_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "vocab_size": 151936}
_LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def _config(kind: str, hidden: int, layers: int, heads: int, kv_heads: int, dim: int, **fields: Any) -> dict[str, Any]:
    return _COMMON | {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        **fields,
    }


_EXPERTS = {"num_experts_per_tok": 8, "norm_topk_prob": True}
CONFIGS = {
    "8B": _config("qwen3", 4096, 36, 32, 8, 128, intermediate_size=12288),
    "27B": _config("qwen3_5", 5120, 64, 24, 4, 256, intermediate_size=17408, **_LINEAR, vocab_size=248320),
    "30B-A3B": _config("qwen3_moe", 2048, 48, 32, 4, 128, num_experts=128, moe_intermediate_size=768, **_EXPERTS),
}
"""Qwen3-8B, Qwen3.5-27B (three of four layers are Gated DeltaNet layers) and Qwen3-30B-A3B."""
_SMALL_LINEAR = {name: 16 if "dim" in name else 2 for name in _LINEAR} | {"linear_conv_kernel_dim": 4}
_TINY_LIMITS = {"vocab_size": 256, "max_position_embeddings": 512}
TINY = {
    "8B": _config("qwen3", 64, 1, 2, 1, 32, intermediate_size=64, **_TINY_LIMITS),
    "27B": _config("qwen3_5", 64, 4, 2, 1, 32, intermediate_size=64, **_SMALL_LINEAR, **_TINY_LIMITS),
    "30B-A3B": _config(
        "qwen3_moe", 64, 1, 2, 1, 32, num_experts=4, moe_intermediate_size=32, **_EXPERTS, **_TINY_LIMITS
    )
    | {"num_experts_per_tok": 2},
}
"""Tiny models of the same architectures, for tests of a script."""


def _agreeing(tiny: bool) -> dict[str, dict[str, Any]]:
    """Return the configurations of small models of all architectures, by `model_type`.

    If `tiny` is False, the numbers of heads, query groups and widths are as in real models.
    """
    hidden, layers, wide = (64, 1, 64) if tiny else (512, 4, 1024)
    common = {"vocab_size": 192 if tiny else 2048, "max_position_embeddings": 1024, "rope_theta": 10_000.0}
    linear = _SMALL_LINEAR if tiny else _LINEAR | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    experts = {"num_experts": 8 if tiny else 16, "num_experts_per_tok": 4, "norm_topk_prob": True}
    window = 32 if tiny else 128

    def config(kind: str, heads: int, kv_heads: int, dim: int, **fields: Any) -> dict[str, Any]:
        heads, dim = (2, 32) if tiny else (heads, dim)
        kinds = 2 if kind in ("qwen3_5", "gpt_oss", "gemma3") else 1  # number of layer types in the architecture
        count = max(layers, kinds)
        shape = _config(kind, hidden, count, heads, 1 if tiny else kv_heads, dim, intermediate_size=wide)
        return shape | common | fields

    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    trained = {"original_max_position_embeddings": 256}
    swiglu = {"num_local_experts": 8, "num_experts_per_tok": 4, "rope_scaling": yarn | trained}
    return {
        "llama": config("llama", 8, 2, 64, rope_scaling=llama3 | trained),
        "qwen3": config("qwen3", 8, 2, 128),
        "qwen3_moe": config("qwen3_moe", 8, 4, 64, moe_intermediate_size=wide // 2, **experts),
        "qwen3_5": config("qwen3_5", 4, 2, 256, full_attention_interval=2, **linear),
        "gpt_oss": config("gpt_oss", 8, 1, 64, sliding_window=window, **swiglu),
        "gemma3": config(
            "gemma3",
            4,
            2,
            256,
            sliding_window=window,
            sliding_window_pattern=2,
            query_pre_attn_scalar=32 if tiny else 256,
            tie_word_embeddings=False,
        ),
    }


AGREEING, TINY_AGREEING = _agreeing(False), _agreeing(True)
"""Models for `agreement.py`."""


class RandomModel:
    """A checkpoint in memory for benchmarks. All tensors share one pool of random numbers, to save time and memory.

    The class implements the protocol `weights.checkpoint.Checkpoint`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self._shapes = dict(_shapes(config))
        self.total_bytes = 2 * sum(torch.Size(shape).numel() for shape in self._shapes.values())

    @cached_property
    def _pool(self) -> Tensor:
        largest = max(torch.Size(shape).numel() for shape in self._shapes.values())
        generator = torch.Generator().manual_seed(1)
        numbers = torch.randn(min(largest, 1 << 24), generator=generator).mul_(0.02).to(torch.bfloat16)
        return numbers.repeat(-(-largest // len(numbers)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Weight:
        return _part_of(self._numbers(name, index), part)

    def column_block(self, name: str) -> int:
        return 1

    def on_meta(self, name: str, shape: tuple[int, ...]) -> Weight:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def close(self) -> None:
        """Do nothing, because the checkpoint has no open files."""

    def write(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, with one file per layer and one file for all other tensors."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        files: dict[str, list[str]] = {}
        for name in self._shapes:
            layer = name.split(".")[2] if ".layers." in name else "rest"
            files.setdefault(f"model-{layer}.safetensors", []).append(name)
        for file, names in files.items():
            save_file({name: self._numbers(name).clone() for name in names}, folder / file)
        index = {name: file for file, names in files.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    def _numbers(self, name: str, index: int | None = None) -> Tensor:
        shape = self._shapes[name] if index is None else self._shapes[name][1:]
        numbers = self._pool[: torch.Size(shape).numel()].view(shape)
        return numbers + 1 if "norm" in name else numbers


class DistinctModel(RandomModel):
    """A checkpoint in memory in which every tensor has its own random numbers, so that any error changes the logits.

    The random numbers are scaled so that the model behaves like a trained model: attention concentrates on a few
    positions, recurrent states decay at medium rates, and few tokens have nearly equal logits.

    Args:
        quant: quantization of the stored matrices (a name in `weights.quantization_formats`), or empty. Experts of
            gpt-oss are always MXFP4.
    """

    def __init__(self, config: dict[str, Any], quant: str = "") -> None:
        super().__init__(config)
        self._policy = QuantPolicy(quant, config["num_hidden_layers"])
        self._offset = model_class(config["model_type"]).norm_offset
        self._tensors: dict[str, Weight] = {}

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Weight:
        key = name if index is None else f"{name}#{index}"
        if key not in self._tensors:  # several engines load the same tensor
            shape = self._shapes[name] if index is None else self._shapes[name][1:]
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            numbers = self._scaled(name, torch.randn(shape, generator=generator), generator)
            self._tensors[key] = self._form(key, shape[-1])(numbers)
        weight = self._tensors[key]
        return _part_of(weight.clone() if isinstance(weight, Tensor) else weight, part)

    def column_block(self, name: str) -> int:
        row = self._form(name, self._shapes[name][-1])(torch.zeros(1, self._shapes[name][-1]))
        return row.shape[1] // row.scale.unit.shape[1] if isinstance(row, GroupwiseTensor) else 1

    def on_meta(self, name: str, shape: tuple[int, ...]) -> Weight:
        row = self._form(name, shape[-1])(torch.zeros(1, shape[-1]))
        return row.on_meta(shape[0]) if isinstance(row, GroupwiseTensor) else super().on_meta(name, shape)

    def _scaled(self, name: str, numbers: Tensor, generator: torch.Generator) -> Tensor:
        """Scale standard normal numbers to the size that the values of the tensor `name` have in real models."""
        suffix = name.removesuffix(".weight").rpartition(".")[2]
        gain = _GAINS.get(suffix, 1.0)
        if "norm" in suffix:
            # The norm of a Gated DeltaNet layer has no offset in any architecture.
            return gain * (1 + 0.3 * numbers) - (0.0 if "linear_attn" in name else self._offset)
        match suffix:
            case "A_log":  # the decay times of recurrent states are from one position to a thousand positions
                return -6 * torch.rand(numbers.shape, generator=generator)
            case "conv1d" | "dt_bias":
                return numbers / 2
            case "sinks":
                return numbers
            case "embed_tokens":  # gemma3 multiplies embeddings by the square root of their size
                return numbers / (numbers.shape[1] ** 0.5 if self.config["model_type"] == "gemma3" else 1)
            case "lm_head":
                lengths = torch.randn(len(numbers), 1, generator=generator).mul_(0.5).exp_()
                return 3 * numbers * lengths / numbers.shape[1] ** 0.5  # few tokens get most of the probability
        if "bias" in name:
            return 0.3 * numbers
        if ".experts." in name and suffix == "down_proj":
            # Rounding may decide which of two nearly tied experts a router selects. Small outputs of experts limit the
            # effect.
            gain = 0.3 if self.config["model_type"] == "gpt_oss" else 1.0
        return numbers * gain / numbers.shape[-1] ** 0.5

    def _in_mxfp4(self, name: str) -> bool:
        return self.config["model_type"] == "gpt_oss" and ".experts." in name and "bias" not in name

    def _form(self, key: str, columns: int) -> Callable[[Tensor], Weight]:
        """Return the function that converts random numbers to the stored format of the tensor `key`."""
        if self._in_mxfp4(key):
            return mxfp4
        form = self._policy.format_of(key, columns)
        if form is None:
            return lambda numbers: numbers.to(torch.bfloat16)
        return lambda numbers: quantize(numbers, form) or numbers


def _part_of(weight: Weight, part: Part) -> Weight:
    if part.rows is not None:
        rows = torch.from_numpy(part.rows)
        weight = weight[rows] if isinstance(weight, Tensor) else weight.rows(rows)
    if part.columns is not None:
        weight = weight[..., part.columns] if isinstance(weight, Tensor) else weight.columns(part.columns)
    return weight


_GAINS = {"q_proj": 1.5, "k_proj": 1.5, "q_norm": 1.5, "k_norm": 1.5, "gate": 4.0, "router": 4.0, "down_proj": 2.0}
"""Gains of matrices, relative to unit gain; large gains separate the scores of attention and of experts."""

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # in units of 1/2


def mxfp4(numbers: Tensor) -> GroupwiseTensor:
    """Quantize a matrix with shape [N, K] to MXFP4: e2m1 codes with one power-of-two scale per 32 columns."""
    table = torch.tensor([*_E2M1, *(-level for level in _E2M1)])
    groups = numbers.unflatten(-1, (-1, 32))
    unit = torch.exp2((groups.abs().amax(-1) / _E2M1[-1]).clamp(min=2.0**-20).log2().ceil())
    codes = (groups[..., None] / unit[..., None, None] - table).abs().argmin(-1)
    return GroupwiseTensor(codes.flatten(-2).byte(), GroupScale(unit), None, 0, 4, 32, table.to(torch.int8))


_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_5", "gemma3")


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocabulary, dim = config["hidden_size"], config["vocab_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    yield "lm_head.weight", (vocabulary, hidden)
    yield "model.norm.weight", (hidden,)
    kind = config["model_type"]
    hybrid = kind == "qwen3_5"
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if kind == "gemma3":
            yield f"{prefix}.pre_feedforward_layernorm.weight", (hidden,)
            yield f"{prefix}.post_feedforward_layernorm.weight", (hidden,)
        if hybrid and (layer + 1) % config.get("full_attention_interval", 4):
            yield from _linear_attention(config, f"{prefix}.linear_attn", hidden)
        else:
            attention = f"{prefix}.self_attn"
            yield f"{attention}.q_proj.weight", (queries * (2 if hybrid else 1), hidden)
            yield f"{attention}.k_proj.weight", (keys, hidden)
            yield f"{attention}.v_proj.weight", (keys, hidden)
            yield f"{attention}.o_proj.weight", (hidden, queries)
            if kind in _QK_NORM:
                yield f"{attention}.q_norm.weight", (dim,)
                yield f"{attention}.k_norm.weight", (dim,)
            if kind == "gpt_oss":
                yield f"{attention}.sinks", (config["num_attention_heads"],)
                for projection, rows in {"q": queries, "k": keys, "v": keys, "o": hidden}.items():
                    yield f"{attention}.{projection}_proj.bias", (rows,)
        if kind == "gpt_oss":
            experts, width = config["num_local_experts"], config["intermediate_size"]
            yield f"{prefix}.mlp.router.weight", (experts, hidden)
            yield f"{prefix}.mlp.router.bias", (experts,)
            yield f"{prefix}.mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
            yield f"{prefix}.mlp.experts.gate_up_proj_bias", (experts, 2 * width)
            yield f"{prefix}.mlp.experts.down_proj", (experts, hidden, width)
            yield f"{prefix}.mlp.experts.down_proj_bias", (experts, hidden)
        elif "num_experts" in config:
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
