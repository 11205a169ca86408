"""A GGUF file as a checkpoint: Hugging Face's names, configuration and row order."""

import re
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.formats import Weight
from helexa.neuron.weights.gguf import GgufFile, GgufTensor
from helexa.neuron.weights.gguf_blocks import PLAIN_TYPES, SUPPORTED_TYPES, decode
from helexa.neuron.weights.gguf_config import gguf_config

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)", re.ASCII)

# Converters reorder the rows of q and k of these architectures for ggml's interleaved rotary embedding.
_INTERLEAVED = {"llama"}
_QUERY_OR_KEY = re.compile(r"model\.layers\.\d+\.self_attn\.(?P<part>[qk])_proj\.(weight|bias)", re.ASCII)


class GgufCheckpoint:
    """The weights in one GGUF file; see `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        """Open the file at `path`.

        Raises:
            ModelFileError: when the file is not sound, is one of several parts, or holds a type that is not supported.
        """
        self._file = GgufFile.open(path)
        self._require_supported()
        self.config: dict[str, Any] = gguf_config(self._file)
        self._tensors = {_translate(name): tensor for name, tensor in self._file.tensors.items()}
        self.total_bytes = sum(tensor.nbytes for tensor in self._file.tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def names(self) -> list[str]:
        """Tensor names, in the file's order; a tensor without a Hugging Face name keeps its own."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return self._find(name).shape

    def read(self, name: str) -> Weight:
        """Tensor `name`, in Hugging Face's row order."""
        tensor = self._find(name)
        weight = decode(tensor.type, self._file.read(tensor.name), tensor.shape)
        rotary = _QUERY_OR_KEY.fullmatch(name)
        if rotary and self._file.architecture in _INTERLEAVED:
            heads = "num_attention_heads" if rotary["part"] == "q" else "num_key_value_heads"
            return self._deinterleave(name, weight, self.config[heads])
        return weight

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _find(self, name: str) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self._file.path.name}: no tensor {name}")
        return tensor

    def _require_supported(self) -> None:
        parts = self._file.metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise ModelFileError(f"{self._file.path.name}: one of {parts} parts; merge them into one file first")
        for tensor in self._file.tensors.values():
            if tensor.type not in SUPPORTED_TYPES:
                problem = f"unsupported tensor type {tensor.type.name} in {tensor.name}"
            elif len(tensor.shape) == 1 and tensor.type not in PLAIN_TYPES:
                problem = f"tensor {tensor.name} is a vector of type {tensor.type.name}, expected a matrix"
            else:
                continue
            raise ModelFileError(f"{self._file.path.name}: {problem}")

    def _deinterleave(self, name: str, weight: Weight, heads: int) -> Weight:
        if weight.shape[0] % (2 * heads):
            raise ModelFileError(f"{self._file.path.name}: the rows of {name} do not divide into {heads} heads")
        if isinstance(weight, Tensor):
            return _pairs_to_halves(weight, heads)
        return weight.each(lambda part: _pairs_to_halves(part, heads))


def _translate(name: str) -> str:
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    names = _NAMES if match["layer"] is None else _LAYER_NAMES
    if match["part"] not in names:
        return name
    prefix = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{prefix}{names[match['part']]}.{match['kind']}"


def _pairs_to_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from (0, h, 1, h + 1, ...) back to (0, 1, ..., h, h + 1, ...), h half a head."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
