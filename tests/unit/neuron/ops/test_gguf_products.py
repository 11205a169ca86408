"""Products with blocks of every GGUF type, filled with random bytes."""

from dataclasses import replace

import pytest
import torch

from helexa.neuron.ops.native.native import NativeOps
from neuron.ops import float64
from neuron.weights.test_gguf_blocks import BLOCKS, decode_random

WIDENED = "NVFP4"  # multiplied in bfloat16


@pytest.mark.parametrize("kind", BLOCKS)
def test_product_with_blocks_of_every_type_is_accurate(native: NativeOps, kind: str) -> None:
    weight = decode_random(kind, 20, 16)
    if kind == "MXFP4":  # its scales can overflow float32 sums
        weight = replace(weight, scale=replace(weight.scale, unit=weight.scale.unit.clamp(max=2.0**60)))
    matrix, x = native.matrix(weight), torch.randn(7, weight.shape[1])
    assert (matrix.number is None) == (kind == WIDENED)
    out = native.linear([matrix], None)(x)
    expected = float64.product(x, weight.dequantize(torch.bfloat16) if kind == WIDENED else weight)
    assert ((out - expected.exact).abs() <= expected.tolerance).all()
    assert torch.equal(native.linear([matrix], None)(x[3:4]), out[3:4])
