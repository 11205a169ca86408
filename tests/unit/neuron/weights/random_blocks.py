"""Random quantization blocks of every GGUF type."""

import numpy as np

from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES, GgmlType

# Byte offsets of the float16 numbers in a block. IQ1_M stores its scale in four pieces, so its list is empty.
_HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q8_K": [],
    "IQ1_S": [0],
    "IQ1_M": [],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "Q1_0": [0],
    "MXFP4": [],
    "NVFP4": [],
}
BLOCKS = list(_HALVES)
"""Names of the quantized types."""


def random_blocks(kind: str, rows: int, blocks: int) -> np.ndarray:
    """Return random blocks with every bit pattern of codes.

    The scales are finite and include zero, tiny, huge and negative values, which a quantizer may never write.
    """
    generator = np.random.default_rng(7)
    _, size = BLOCK_SIZES[GgmlType[kind]]
    stored = generator.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    scales = generator.normal(0, 3000, (rows, blocks, 2)).astype(np.float16)
    scales[0, :5] = np.array([[0.0, -0.0, 6e-8, 65504.0, -65504.0]], np.float16).T[:blocks]
    for index, at in enumerate(_HALVES[kind]):
        stored[:, :, at : at + 2] = scales[:, :, index : index + 1].view(np.uint8)
    if kind == "Q8_K":
        stored[:, :, :4] = scales[:, :, :1].astype(np.float32).view(np.uint8)
    if kind == "IQ1_M":  # each of four 16-bit words holds 4 bits of the scale above three small scales
        nibbles = scales[:, :, :1].view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15
        small = stored[:, :, 48:].view(np.uint16)
        stored[:, :, 48:] = (small & 0x0FFF | nibbles << 12).view(np.uint8)
    if kind == "MXFP4":
        stored[0, :5, 0] = [0, 1, 2, 127, 254]
    if kind == "NVFP4":  # a scale has no sign bit
        stored[:, :, :4] &= 0x7F
        stored[0, :5, 0] = [0, 1, 7, 126, 127]
    stored[1, :2] = 0
    return stored.reshape(rows, -1)
