"""Convert tensors from the layout of GGUF files to Hugging Face's layout.

The conversions undo the changes that llama.cpp's converters make: `conversion/llama.py`, `gemma.py` and `qwen.py`.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.formats import GroupwiseTensor, Weight

_ROUND_ROBIN_HEADS = {"qwen35", "qwen35moe"}
_SHIFTED_NORMS = {"gemma3", "qwen3next", *_ROUND_ROBIN_HEADS}
_LAYER = re.compile(r"model\.layers\.\d+\.", re.ASCII)


class GgufLayout:
    """Converts the tensors of one GGUF model to Hugging Face's layout.

    GGUF files differ from Hugging Face's checkpoints in the following ways:

    * llama: the rows of q and k are interleaved in pairs for ggml's rotary embedding.
    * gemma3, qwen3next, qwen35, qwen35moe: the weights of norms are stored as `1 + w`, except the norm inside linear
      attention.
    * Linear attention: `A_log` is stored as `-exp(A_log)`, and the convolution weight lacks the middle dimension of
      size 1.
    * qwen35, qwen35moe: value heads are ordered round-robin over the key heads. Hugging Face groups them by key head.
    * The gate of a shared expert may be a vector [K] instead of a matrix [1, K].

    Args:
        architecture: architecture of the GGUF file.
        config: configuration from `gguf_config`.
    """

    def __init__(self, architecture: str, config: Mapping[str, Any]) -> None:
        self._shifted_norms = architecture in _SHIFTED_NORMS
        self._interleaved_heads: dict[str, int] = {}
        if architecture == "llama":
            self._interleaved_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._value_heads = _ValueHeads(config) if architecture in _ROUND_ROBIN_HEADS else None

    def shape(self, name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of tensor `name` in Hugging Face's layout. `stored` is its shape in the GGUF file."""
        if name.endswith(".linear_attn.conv1d.weight") and len(stored) == 2:
            return (stored[0], 1, stored[1])
        if name.endswith(".mlp.shared_expert_gate.weight") and len(stored) == 1:
            return (1, *stored)
        return stored

    def restore(self, name: str, weight: Weight) -> Weight:
        """Convert the weight of tensor `name` to Hugging Face's layout.

        Args:
            name: Hugging Face name of the tensor.
            weight: the weight, which must already have the shape that the method `shape` returns.

        Raises:
            ModelFileError: the number of rows or columns does not match the configuration.
        """
        local_name = _LAYER.sub("", name)
        if self._shifted_norms and local_name.endswith("norm.weight") and local_name != "linear_attn.norm.weight":
            return _dequantized(weight) - 1
        module, _, rest = local_name.partition(".")
        if module == "self_attn" and rest.partition(".")[0] in self._interleaved_heads:
            return _restore_halves(name, weight, self._interleaved_heads[rest.partition(".")[0]])
        if module != "linear_attn":
            return weight
        if rest == "A_log":
            weight = _dequantized(weight).neg().log()
        return weight if self._value_heads is None else self._value_heads.restore(name, rest, weight)


class _ValueHeads:
    """Restores Hugging Face's order of value heads in the tensors of linear attention.

    Several value heads share a key head. GGUF orders value heads by their number within the key head: (k0 v0, k1 v0,
    .., k0 v1, k1 v1, ..). Hugging Face orders them by key head: (k0 v0, k0 v1, .., k1 v0, k1 v1, ..).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        keys, self._count = config["linear_num_key_heads"], config["linear_num_value_heads"]
        if self._count % keys:
            raise ModelFileError(f"{self._count} value heads of linear attention do not share {keys} key heads")
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

    def restore(self, name: str, local_name: str, weight: Weight) -> Weight:
        if self._count == self._keys:
            return weight
        if local_name == "out_proj.weight":
            return self._columns(name, weight)
        if local_name not in self._rows:
            return weight
        start, width = self._rows[local_name]
        if weight.shape[0] != start + self._count * width:
            raise ModelFileError(f"the rows of {name} do not match {self._count} value heads")
        heads = torch.arange(start, weight.shape[0]).view(-1, self._keys, width).transpose(0, 1).flatten()
        rows = torch.cat((torch.arange(start), heads))
        return weight.rows(rows) if isinstance(weight, GroupwiseTensor) else weight[rows]

    def _columns(self, name: str, weight: Weight) -> Weight:
        if weight.shape[-1] != self._count * self._width:
            raise ModelFileError(f"the columns of {name} do not match {self._count} value heads")
        if isinstance(weight, Tensor):
            return self._reorder_columns(weight)
        scales = [scale for scale in (weight.scale, weight.minimum) if scale is not None]
        if any(scale.unit.shape[-1] % self._count for scale in scales):
            return self._reorder_columns(weight.dequantize())  # a scale of 256 columns spans several heads
        return weight.each(self._reorder_columns)  # moves the codes, scales and minimums of each head

    def _reorder_columns(self, columns: Tensor) -> Tensor:
        heads = columns.unflatten(-1, (self._count // self._keys, self._keys, -1))
        return heads.transpose(-3, -2).flatten(-3).contiguous()


def _restore_halves(name: str, weight: Weight, heads: int) -> Weight:
    """Reorder the rows of each attention head from GGUF's interleaved order to Hugging Face's order.

    For a head of 2h rows, GGUF stores Hugging Face's rows in the order (0, h, 1, h + 1, ..). The result has the order
    (0, 1, .., h, h + 1, ..).
    """
    if weight.shape[0] % (2 * heads):
        raise ModelFileError(f"the rows of {name} do not divide into {heads} heads")

    def reorder(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()

    return reorder(weight) if isinstance(weight, Tensor) else weight.each(reorder)


def _dequantized(weight: Weight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize()
