"""The numpy backend reads the same weights as torch: all types of GGUF files, fp8, MXFP4, and quantization at load."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.ops.native.kernel_library import native_kernels
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.tensors import functions
from helexa.neuron.weights.gguf import blocks
from helexa.neuron.weights.gguf.blocks import PLAIN_TYPES, decode
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES, GgmlType
from helexa.neuron.weights.quantized_matrix import GroupScale, GroupwiseTensor, Weight
from neuron.weights.random_blocks import BLOCKS, random_blocks
from numpy_tensors import numpy_tensors

ROWS, COLUMNS = 16, 1536


def stored(kind: str) -> NDArray[np.uint8]:
    weights, _ = BLOCK_SIZES[GgmlType[kind]]
    return random_blocks(kind, ROWS, COLUMNS // weights).reshape(-1)


def parts(value: Any) -> list[Any]:
    """Return all numbers of a weight as numpy arrays, with the names of their dtypes."""
    if isinstance(value, GroupwiseTensor | GroupScale):
        return [part for field in fields(value) for part in parts(getattr(value, field.name))]
    if isinstance(value, tensors.Tensor):
        return [tensors.dtype_name(value.dtype), value.float().contiguous().numpy()]
    return [value]


def assert_equal_parts(own: list[Any], expected: list[Any]) -> None:
    assert len(own) == len(expected)
    for part, wanted in zip(own, expected, strict=True):
        if isinstance(wanted, np.ndarray):
            np.testing.assert_array_equal(part, wanted)
        else:
            assert part == wanted


def dequantized(weight: Weight) -> tensors.Tensor:
    return weight.dequantize() if isinstance(weight, GroupwiseTensor) else weight.float()


@pytest.mark.parametrize("kind", BLOCKS)
def test_gguf_blocks_decode_to_the_same_numbers_with_numpy_as_with_torch(kind: str) -> None:
    def read() -> list[Any]:
        weight = decode(GgmlType[kind], stored(kind), (ROWS, COLUMNS))
        return [*parts(weight), *parts(dequantized(weight))]

    expected = read()
    with numpy_tensors():
        assert_equal_parts(read(), expected)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_1", "IQ2_XXS", "IQ3_S", "MXFP4", "TQ2_0"])
def test_gguf_blocks_decode_to_the_same_numbers_with_several_threads_as_with_one(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> list[Any]:
        return parts(decode(GgmlType[kind], stored(kind), (ROWS, COLUMNS)))

    with numpy_tensors():
        monkeypatch.setattr(functions, "_threads", [3])
        expected = read()
        monkeypatch.setattr(blocks, "_FEW_WEIGHTS", 1)
        assert_equal_parts(read(), expected)


@pytest.mark.parametrize("kind", [kind.name for kind in PLAIN_TYPES])
def test_unquantized_gguf_types_have_the_same_numbers_with_numpy_as_with_torch(kind: str) -> None:
    data = np.random.default_rng(3).normal(size=2 * ROWS * COLUMNS).astype(np.float32).view(np.uint8)
    size = BLOCK_SIZES[GgmlType[kind]][1] * ROWS * COLUMNS

    def read() -> list[Any]:
        return parts(decode(GgmlType[kind], data[:size], (ROWS, COLUMNS)))

    with np.errstate(invalid="ignore"):
        expected = read()
        with numpy_tensors():
            assert_equal_parts(read(), expected)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "IQ2_XXS", "IQ3_S", "MXFP4", "NVFP4", "TQ1_0"])
def test_matrices_packed_with_numpy_have_the_same_bytes_as_with_torch(kind: str) -> None:
    def pack() -> tuple[Any, NDArray[np.uint8]]:
        matrix = NativeOps(native_kernels(), 1).matrix(decode(GgmlType[kind], stored(kind), (ROWS, COLUMNS)))
        return matrix.number, matrix.data.numpy().copy()

    number, expected = pack()
    with numpy_tensors():
        own_number, own = pack()
    assert own_number == number
    np.testing.assert_array_equal(own, expected)
