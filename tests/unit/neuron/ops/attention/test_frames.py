"""Operations of vision towers: frames do not change each other's results, and activations are accurate."""

from itertools import product

import pytest
import torch

from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.kernel_header import SEGMENT_POSITIONS
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.reference.reference_ops import ACTIVATIONS
from helexa.neuron.ops.triton.gpu_ops import GpuOps
from neuron.ops.paging import CPU
from nightly import daily

LENGTHS = (70, 1, SEGMENT_POSITIONS + 65, 64, 23)


OPS = ("native", "triton")
SIZES = list(product(OPS, (64, 80)))


@pytest.fixture(params=OPS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.getfixturevalue("native") if request.param == "native" else GpuOps(CPU, torch.float32)


@pytest.mark.parametrize(
    ("ops", "dim"), daily([size for size in SIZES if size != ("triton", 64)], SIZES, several=True), indirect=["ops"]
)
def test_attention_of_an_image_frame_does_not_depend_on_other_frames(ops: Ops, dim: int) -> None:
    qkv = torch.randn(sum(LENGTHS), 6, dim)
    angles = torch.randn(sum(LENGTHS), 32)
    out = ops.attend_frames(qkv.clone(), (angles.cos(), angles.sin()), LENGTHS, 0.2).clone()
    start = 0
    for length in LENGTHS:
        frame = slice(start, start + length)
        rope = angles[frame].cos(), angles[frame].sin()
        alone = ops.attend_frames(qkv[frame].clone(), rope, (length,), 0.2)
        assert torch.equal(alone, out[frame])
        start += length


def test_nan_in_unused_memory_does_not_change_frame_attention(native: NativeOps) -> None:
    """The kernels read keys and values only of rows that exist, even if the rest of the memory is NaN."""
    qkv = torch.randn(65, 3, 64)
    expected = native.attend_frames(qkv, None, (65,), 0.2).clone()
    native._launcher._workspace.spoil()
    assert torch.equal(native.attend_frames(qkv, None, (65,), 0.2), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_native_activation_matches_float64_within_rounding(native: NativeOps, activation: str) -> None:
    x = torch.cat((torch.linspace(-12, 12, 4064), torch.tensor([0.0, -0.0, 1e-30, -1e-30] * 8))).view(2, -1)
    exact = ACTIVATIONS[activation](x.double())
    error = (native.activate(x.clone(), activation).double() - exact).abs()
    size = torch.maximum(x.double().abs(), exact.abs())  # the square of relu2 is larger than x
    assert float((error / (size + 1e-30)).max()) < 3e-7


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_native_activation_of_nan_is_nan(native: NativeOps, activation: str) -> None:
    assert native.activate(torch.full((1, 16), torch.nan), activation).isnan().all()


@pytest.mark.parametrize("width", [16, 64, 1152])
@pytest.mark.parametrize("rows", [1, 3, 700])
def test_native_layer_norm_matches_float64_within_rounding(native: NativeOps, rows: int, width: int) -> None:
    weight, bias = torch.randn(2, width)
    x = torch.randn(rows, width) + 100
    expected = torch.nn.functional.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-6)
    torch.testing.assert_close(native.layer_norm(weight, bias, 1e-6)(x).double(), expected, rtol=0, atol=1e-4)
