"""Convert tensors from the layout of GGUF files to Hugging Face's layout.

The order of rows and columns is expressed as the numbers of rows and columns in the file, so that a rank can read a
part of a tensor. The conversions undo the changes that llama.cpp's converters make: `conversion/llama.py`, `gemma.py`
and `qwen.py`.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.formats import Weight

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

    def rows(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        """Return for each row of tensor `name` in Hugging Face's order the number of the row in the file.

        Args:
            name: Hugging Face name of the tensor.
            shape: shape of the tensor in Hugging Face's layout.

        Returns:
            int64, the numbers of all rows; None if the order is the same.

        Raises:
            ModelFileError: the number of rows does not match the configuration.
        """
        module, _, rest = _LAYER.sub("", name).partition(".")
        projection = rest.partition(".")[0]
        if module == "self_attn" and projection in self._interleaved_heads:
            return _halves(name, shape[0], self._interleaved_heads[projection])
        if module == "linear_attn" and self._value_heads is not None:
            return self._value_heads.rows(name, rest, shape[0])
        return None

    def columns(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
        """Return for each column of tensor `name` in Hugging Face's order the number of the column in the file.

        See `rows` for the arguments and errors.
        """
        if self._value_heads is not None and _LAYER.sub("", name) == "linear_attn.out_proj.weight":
            return self._value_heads.columns(name, shape[-1])
        return None

    def restore(self, name: str, weight: Weight) -> Weight:
        """Convert the values of tensor `name`, or of a part of the tensor, to the values in Hugging Face's checkpoint.

        Args:
            name: Hugging Face name of the tensor.
        """
        local_name = _LAYER.sub("", name)
        if self._shifted_norms and local_name.endswith("norm.weight") and local_name != "linear_attn.norm.weight":
            return _dequantized(weight) - 1
        return _dequantized(weight).neg().log() if local_name == "linear_attn.A_log" else weight


class _ValueHeads:
    """The order of value heads in the tensors of linear attention.

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

    def rows(self, name: str, local_name: str, count: int) -> NDArray[np.int64] | None:
        """Return the rows of all heads in Hugging Face's order (see `GgufLayout.rows`)."""
        if self._count == self._keys or local_name not in self._rows:
            return None
        start, width = self._rows[local_name]
        if count != start + self._count * width:
            raise ModelFileError(f"the rows of {name} do not match {self._count} value heads")
        return np.concatenate((np.arange(start), self._order(start, width)))

    def columns(self, name: str, count: int) -> NDArray[np.int64] | None:
        """Return the columns of all heads in Hugging Face's order (see `GgufLayout.columns`)."""
        if self._count == self._keys:
            return None
        if count != self._count * self._width:
            raise ModelFileError(f"the columns of {name} do not match {self._count} value heads")
        return self._order(0, self._width)

    def _order(self, start: int, width: int) -> NDArray[np.int64]:
        numbers = np.arange(start, start + self._count * width)
        return numbers.reshape(-1, self._keys, width).swapaxes(0, 1).ravel()


def _halves(name: str, count: int, heads: int) -> NDArray[np.int64]:
    """Return the rows of attention heads in Hugging Face's order, which GGUF interleaves.

    For a head of 2h rows, GGUF stores Hugging Face's rows in the order (0, h, 1, h + 1, ..). The result has the order
    (0, 1, .., h, h + 1, ..).

    Args:
        count: number of rows of all heads.
    """
    if count % (2 * heads):
        raise ModelFileError(f"the rows of {name} do not divide into {heads} heads")
    return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _dequantized(weight: Weight) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else weight.dequantize()
