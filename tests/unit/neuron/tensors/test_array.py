"""Functions and methods of the numpy backend return the bytes and dtypes that torch returns."""

import gc
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helexa.neuron import tensors
from numpy_tensors import numpy_tensors

Case = Callable[[dict[str, Any]], Any]

_RANDOM = np.random.default_rng(5)
INPUTS: dict[str, np.ndarray] = {
    "x": _RANDOM.normal(0, 3, (6, 4, 8)).astype(np.float32),
    "y": _RANDOM.normal(0, 3, (6, 4, 8)).astype(np.float32),
    "row": _RANDOM.normal(0, 1, 40).astype(np.float32),
    "wide": _RANDOM.normal(0, 1e4, (3, 5)),
    "half": _RANDOM.normal(0, 1, (5, 8)).astype(np.float16),
    "bytes": _RANDOM.integers(0, 256, (5, 32)).astype(np.uint8),
    "index": _RANDOM.integers(0, 6, 9),
    "places": _RANDOM.integers(0, 8, (6, 4, 2)),
    "ints": _RANDOM.integers(-1000, 1000, (5, 8)).astype(np.int32),
    "mask": _RANDOM.integers(0, 2, (6, 4, 8)).astype(np.bool_),
    "special": np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38, 65519.9, 1.00390625], np.float32),
}

CASES: dict[str, Case] = {
    # memory and shape
    "view": lambda a: a["x"].view(24, 8),
    "view of a tuple": lambda a: a["x"].view((-1, 16)),
    "view as another dtype": lambda a: a["bytes"].view(tensors.int32),
    "view as float16": lambda a: a["bytes"].view(tensors.float16),
    "view as float8": lambda a: a["bytes"].view(tensors.float8_e4m3fn).float(),
    "view as wide float8": lambda a: a["bytes"].view(tensors.float8_e5m2).half(),
    "view as powers of two": lambda a: a["bytes"].view(tensors.float8_e8m0fnu).float(),
    "unflatten": lambda a: a["x"].unflatten(-1, (-1, 2)),
    "unflatten the first": lambda a: a["x"].unflatten(0, (2, 3)),
    "flatten": lambda a: a["x"].flatten(),
    "flatten the last": lambda a: a["x"].flatten(-2),
    "flatten the first": lambda a: a["x"].flatten(0, 1),
    "transpose": lambda a: a["x"].transpose(1, 2),
    "T": lambda a: a["wide"].T.contiguous(),
    "movedim": lambda a: a["x"].movedim(2, 0),
    "unsqueeze": lambda a: a["x"].unsqueeze(-1),
    "squeeze": lambda a: a["x"][:, :1].squeeze(1),
    "squeeze nothing": lambda a: a["x"].squeeze(1),
    "expand": lambda a: a["x"][:, :1].expand(-1, 5, -1),
    "expand a row": lambda a: a["row"].expand(3, 40),
    "split": lambda a: a["x"].split((1, 5, 2), dim=-1)[1],
    "split by size": lambda a: a["x"].split(4)[-1],
    "unbind": lambda a: a["x"].unbind(1)[3],
    "iterate": lambda a: list(a["x"])[2],
    "repeat": lambda a: a["wide"].repeat(3, 1),
    "repeat_interleave": lambda a: a["x"].repeat_interleave(3, dim=1),
    "clone": lambda a: a["x"].transpose(0, 2).clone(),
    "copy_": lambda a: a["x"].copy_(a["y"]),
    "row of indexes": lambda a: a["x"][a["index"]],
    "list of indexes": lambda a: a["x"][[3, 1]],
    "set rows": lambda a: _set(a["x"], a["index"], 7.0),
    "data_ptr": lambda a: a["x"][2].data_ptr() - a["x"].data_ptr(),
    "stride": lambda a: [a["x"].stride(dim) for dim in range(3)],
    "sizes": lambda a: [a["x"].numel(), a["x"].dim(), a["x"].nbytes, a["x"].itemsize],
    "meta": lambda a: [*tensors.empty((3, 70), dtype=tensors.bfloat16, device="meta").shape, a["x"].is_meta],
    "bytes of meta": lambda a: tensors.empty((3, 70), dtype=tensors.bfloat16, device="meta")[:2].nbytes,
    # dtypes
    "to": lambda a: a["x"].to(a["x"].device, tensors.float16),
    "to bfloat16": lambda a: a["x"].to(tensors.bfloat16).float(),
    "bfloat16 of special numbers": lambda a: a["special"].bfloat16().float(),
    "float16 of special numbers": lambda a: a["special"].half(),
    "bfloat16 of float64": lambda a: a["wide"].bfloat16().float(),
    "bfloat16 of float16": lambda a: a["half"].bfloat16().float(),
    "double": lambda a: a["x"].double(),
    "long": lambda a: a["x"].long(),
    "int": lambda a: a["bytes"].int(),
    "short": lambda a: (a["ints"] * 100).short(),
    "byte": lambda a: a["ints"].byte(),
    "new_zeros": lambda a: a["half"].new_zeros(2, 3),
    # arithmetic
    "sums and products": lambda a: a["x"] * a["y"] + 2 * a["x"] / 3 - a["y"] ** 2,
    "a row times a number": lambda a: a["row"] * (1.0 / 7),
    "bits": lambda a: a["bytes"] & 15 | a["bytes"] >> 4 << 1 ^ 128,
    "bits of int32": lambda a: a["ints"] >> 3 & 7 << 2,
    "wrapped bytes": lambda a: a["bytes"] * a["bytes"],
    "comparison": lambda a: (a["x"] > a["y"]) & ~a["mask"],
    "add_": lambda a: a["x"].add_(a["y"]),
    "sub_": lambda a: a["x"].sub_(3),
    "mul_": lambda a: a["x"].mul_(a["y"]),
    "bitwise_and_": lambda a: a["bytes"].bitwise_and_(7),
    "bitwise_or_": lambda a: a["bytes"].bitwise_or_(a["bytes"] >> 1),
    "bitwise_left_shift_": lambda a: a["bytes"].bitwise_left_shift_(2),
    "round_": lambda a: (a["x"] * 2).round_(),
    "round halves": lambda a: (a["ints"].float() / 2).round_(),
    "clamp": lambda a: a["x"].clamp(max=1.0),
    "clamp_": lambda a: a["x"].clamp_(-1, 2),
    "masked_fill_": lambda a: a["x"].masked_fill_(a["mask"], 0),
    "zero_": lambda a: a["x"].zero_(),
    "nan_to_num_": lambda a: a["bytes"].view(tensors.float8_e4m3fn).half().nan_to_num_(0),
    "abs": lambda a: a["ints"].abs(),
    "neg": lambda a: a["half"].neg(),
    "square": lambda a: a["x"].square(),
    "floor": lambda a: a["x"].floor(),
    "exp2": lambda a: (a["bytes"].float() - 127).exp2(),
    "exp of float64": lambda a: a["x"].double().exp().float(),
    "log of float64": lambda a: a["x"].double().abs().log().float(),
    "isfinite": lambda a: a["special"].isfinite(),
    # along a dimension
    "sum of bytes": lambda a: a["bytes"].int().sum(-1, keepdim=True),
    "sum of all": lambda a: int(a["bytes"].long().sum()),
    "amax": lambda a: a["x"].amax(-1),
    "amin": lambda a: a["x"].amin(-1),
    "amax of all": lambda a: float(a["x"].amax()),
    "argmax": lambda a: a["x"].argmax(-1, keepdim=True),
    "argmax of equal numbers": lambda a: int(a["bytes"].view(-1).bitwise_and_(3).argmax(-1)),
    "argsort": lambda a: a["index"].argsort(stable=True),
    "gather": lambda a: a["x"].gather(-1, a["places"]),
    "index_select": lambda a: a["x"].index_select(0, a["index"]),
    "index_copy_": lambda a: a["x"].index_copy_(0, tensors.tensor([4, 2]), a["y"][:2]),
    "any": lambda a: bool((a["x"] > 100).any()),
    "all": lambda a: bool(a["special"].isfinite().all()),
    "tolist": lambda a: a["ints"].tolist(),
    # functions
    "zeros": lambda a: tensors.zeros(2, 3, dtype=tensors.int64),
    "ones": lambda a: tensors.ones(2, 3),
    "full": lambda a: tensors.full((2,), 5.0),
    "zeros_like": lambda a: tensors.zeros_like(a["half"]),
    "ones_like": lambda a: tensors.ones_like(a["bytes"], dtype=tensors.float32),
    "tensor of integers": lambda a: tensors.tensor([[1, 2], [3, 4]]),
    "tensor of numbers": lambda a: tensors.tensor([0.1, 0.2]),
    "tensor of bytes": lambda a: tensors.tensor([1, 255], dtype=tensors.uint8),
    "arange": lambda a: tensors.arange(3, 20, 4),
    "arange of bytes": lambda a: tensors.arange(0, 8, 2, dtype=tensors.uint8),
    "arange of float64": lambda a: tensors.arange(0, 64, 2, dtype=tensors.float64),
    "arange of fractions": lambda a: tensors.arange(1 / 27, 1.0, 1 / 27),
    "arange of many fractions": lambda a: tensors.arange(1 / 70, 1.0, 1 / 70),
    "frombuffer": lambda a: tensors.frombuffer(bytearray(b"12345678"), dtype=tensors.int32),
    "cat": lambda a: tensors.cat((a["x"], a["y"]), dim=1),
    "cat of rows": lambda a: tensors.cat([a["x"], a["y"]]),
    "stack": lambda a: tensors.stack((a["x"], a["y"]), dim=2),
    "stack of the last": lambda a: tensors.stack((a["bytes"], a["bytes"] >> 4), dim=-1),
    "choose": lambda a: tensors.where(a["mask"], a["x"], a["y"]),
    "choose a number": lambda a: tensors.where(a["x"] == 0, 0, 1 / a["x"]),
    "choose in place": lambda a: tensors.where(a["ints"] < 0, a["ints"], a["ints"] + 1, out=a["ints"]),
    "equal": lambda a: [tensors.equal(a["x"], a["x"]), tensors.equal(a["x"], a["y"])],
    "allclose": lambda a: tensors.allclose(a["x"].half().float(), a["x"], rtol=1e-3, atol=0),
    "eps": lambda a: [float(tensors.finfo(kind).eps) for kind in (tensors.bfloat16, tensors.float16)],
    "empty_like": lambda a: _set(tensors.empty_like(a["half"]), slice(None), 2.0),
    "ldexp": lambda a: tensors.ldexp(a["x"][0], a["ints"][:4] // 100),
    "bucketize": lambda a: tensors.bucketize(a["x"], tensors.arange(-2, 2).float(), right=True),
    "pad": lambda a: tensors.pad(a["x"], (0, 3)),
    "dtype_name": lambda a: [tensors.dtype_name(a[name].dtype) for name in ("x", "half", "ints")],
    "address": lambda a: tensors.address(a["x"][1:]) - tensors.storage_address(a["x"][1:]),
}


def _set(tensor: Any, rows: Any, value: float) -> Any:
    tensor[rows] = value
    return tensor


def run(case: Case) -> Any:
    """Return the result of a case with the chosen backend, as a numpy array with the name of its dtype."""
    result = case({name: tensors.from_numpy(array.copy()) for name, array in INPUTS.items()})
    if isinstance(result, tensors.Tensor):
        return tensors.dtype_name(result.dtype), result.contiguous().numpy()
    return "", np.asarray(result)


@pytest.mark.parametrize("name", CASES)
def test_numpy_backend_returns_the_same_results_as_torch(name: str) -> None:
    dtype, expected = run(CASES[name])
    with numpy_tensors():
        own_dtype, result = run(CASES[name])
    assert (own_dtype, result.shape) == (dtype, expected.shape)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_sums_of_the_numpy_backend_are_close_to_those_of_torch(name: str) -> None:
    def of_columns(inputs: dict[str, Any]) -> Any:
        return getattr(inputs["x"], name)((0, 2), keepdim=True)

    _, expected = run(of_columns)
    with numpy_tensors():
        _, result = run(of_columns)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_memory_lent_to_a_tensor_is_returned_when_its_last_view_is_freed(backend: str) -> None:
    if backend == "numpy":
        with numpy_tensors():
            lend_memory()
    else:
        lend_memory()


def lend_memory() -> None:
    returned: list[memoryview] = []
    block = memoryview(mmap.mmap(-1, 4096))
    tensor = tensors.lent(block, tensors.float32, returned.append)
    view = tensor[:12].view(3, 4)[1:]
    assert tensors.storage_address(view) == tensors.address(tensor)
    assert tensors.may_be_lent(view)
    assert tensors.uses_torch() or not tensors.may_be_lent(tensors.zeros(12))
    del tensor
    gc.collect()
    assert not returned
    view[0, 0] = 1.0
    assert bytes(block[16:20]) == np.float32(1).tobytes()
    del view
    gc.collect()
    assert returned == [block]


def test_view_of_a_numpy_array_that_would_need_a_copy_raises_an_error() -> None:
    with numpy_tensors(), pytest.raises(ValueError, match="copy"):
        tensors.zeros(4, 6).transpose(0, 1).view(-1)


def test_cached_tensors_are_dropped_when_the_tensor_backend_changes() -> None:
    @tensors.cached()
    def table(count: int) -> Any:
        return tensors.arange(count)

    first = table(3)
    assert table(3) is first
    with numpy_tensors():
        assert isinstance(table(3), np.ndarray)
    assert type(table(3)) is type(first)


def test_numpy_backend_supports_no_device_but_the_cpu() -> None:
    with numpy_tensors():
        assert str(tensors.device("cpu")) == "cpu"
        with pytest.raises(RuntimeError, match="torch is not installed; install it with"):
            tensors.device("cuda:1")
