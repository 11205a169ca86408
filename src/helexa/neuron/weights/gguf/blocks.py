"""Decode the bytes of GGUF tensors to weights.

Quantized types keep their exact codes and scales. GGUF stores a quantized row as a sequence of blocks. A block contains
the codes of adjacent columns and their scales.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import numpy as np

from helexa.neuron import tensors
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES, GgmlType
from helexa.neuron.weights.gguf.k_blocks import K_BLOCKS, fields, half, nibbles
from helexa.neuron.weights.gguf.table_blocks import TABLE_BLOCKS
from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor, Weight, joined

# GGUF types read as plain tensors, with the names of their dtypes in torch.
PLAIN_TYPES = {GgmlType.F32: "float32", GgmlType.F16: "float16", GgmlType.BF16: "bfloat16"}

_FEW_WEIGHTS = 1 << 20  # a matrix with fewer weights is decoded by one thread


def _q4_0(blocks: Tensor) -> GroupwiseTensor:
    scale = GroupScale(half(blocks, 0))
    return GroupwiseTensor(nibbles(blocks[:, 2:], 16), scale, None, zero=8, bits=4, group_size=32)


def _q4_1(blocks: Tensor) -> GroupwiseTensor:
    scale, minimum = GroupScale(half(blocks, 0)), GroupScale(half(blocks, 2))
    return GroupwiseTensor(nibbles(blocks[:, 4:], 16), scale, minimum, zero=0, bits=4, group_size=32)


def _q5_0(blocks: Tensor) -> GroupwiseTensor:
    codes = nibbles(blocks[:, 6:], 16).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return GroupwiseTensor(codes, GroupScale(half(blocks, 0)), None, zero=16, bits=5, group_size=32)


def _q5_1(blocks: Tensor) -> GroupwiseTensor:
    codes = nibbles(blocks[:, 8:], 16).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    scale, minimum = GroupScale(half(blocks, 0)), GroupScale(half(blocks, 2))
    return GroupwiseTensor(codes, scale, minimum, zero=0, bits=5, group_size=32)


def _q8_0(blocks: Tensor) -> GroupwiseTensor:
    codes = blocks[:, 2:] ^ 0x80  # flipping the sign bit adds 128 to a signed code
    return GroupwiseTensor(codes, GroupScale(half(blocks, 0)), None, zero=128, bits=8, group_size=32)


def _fifth_bits(packed: Tensor) -> Tensor:
    return fields(packed, 1).bitwise_left_shift_(4)


# Decoder of each quantized type. A decoder returns a matrix with one row per block.
_BLOCKS: dict[GgmlType, Callable[[Tensor], GroupwiseTensor]] = {
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
    GgmlType.Q5_0: _q5_0,
    GgmlType.Q5_1: _q5_1,
    GgmlType.Q8_0: _q8_0,
    **K_BLOCKS,
    **TABLE_BLOCKS,
}

SUPPORTED_TYPES = frozenset(PLAIN_TYPES) | frozenset(_BLOCKS)  # The types that `decode` supports


def decode(kind: GgmlType, stored: np.ndarray, shape: tuple[int, ...]) -> Weight:
    """Decode the bytes of a GGUF tensor's blocks to a weight of `shape`.

    Args:
        kind: a type in `SUPPORTED_TYPES`.
        stored: the tensor's bytes as uint8. If the type is not quantized, the result shares the memory of `stored`.
        shape: shape of the tensor. Its last dimension must be a multiple of the type's block size.
    """
    raw = tensors.from_numpy(stored)
    if kind in PLAIN_TYPES:
        return raw.view(getattr(tensors, PLAIN_TYPES[kind])).view(shape)
    blocks = _decoded(kind, raw.view(-1, BLOCK_SIZES[kind][1]))
    return blocks.each(lambda tensor: tensor.view(*shape[:-1], -1))


def _decoded(kind: GgmlType, blocks: Tensor) -> GroupwiseTensor:
    """Decode blocks [blocks, bytes] to a matrix with one row per block."""
    decoder, count = _BLOCKS[kind], 1 if tensors.uses_torch() else tensors.get_num_threads()
    if count == 1 or blocks.shape[0] * BLOCK_SIZES[kind][0] < _FEW_WEIGHTS:
        return decoder(blocks)
    # torch uses several threads itself, but numpy does not.
    parts = blocks.split(-(-blocks.shape[0] // count))
    with ThreadPoolExecutor(len(parts)) as threads:
        # Each thread gets a copy of the context, because numpy's error settings for infinity and NaN are part of it.
        results = [threads.submit(copy_context().run, decoder, part) for part in parts]
        decoded = [result.result() for result in results]
    if len({part.scale.unit.dtype for part in decoded}) > 1:
        # The decoder of MXFP4 chooses the dtype by the values of all scales, so the parts may have different dtypes.
        return decoder(blocks)
    return joined(decoded)


def growth(kind: GgmlType) -> float:
    """Return the size of a GGUF weight in memory, relative to its size in the file.

    The result is for kernels that store codebook entries as indexes. Kernels for GPUs store the codes instead, which
    takes more memory.
    """
    elements, nbytes = BLOCK_SIZES[kind]
    block = decode(kind, np.zeros(nbytes, np.uint8), (1, elements))
    if isinstance(block, Tensor):
        return 1.0
    scale_bytes = sum(scale.nbytes for scale in (block.scale, block.minimum) if scale is not None)
    bits = block.bits
    # In memory, the indexes of codebook entries and the signs replace the codes.
    if block.codebook is not None:
        entries, width = block.codebook.shape
        signs = 1 if kind in (GgmlType.IQ1_S, GgmlType.IQ1_M) else width  # one shift per entry in IQ1
        bits = (math.log2(entries) + signs) / width
    return (elements * bits / 8 + scale_bytes) / nbytes
