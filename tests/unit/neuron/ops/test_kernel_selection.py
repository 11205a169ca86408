"""Selection of the kernels, and the reason reported if faster kernels are unavailable."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import kernels_for
from helexa.neuron.ops.kernel_header import MIXED
from helexa.neuron.ops.kernel_selection import accelerator_dtype, select_kernels
from helexa.neuron.ops.native import kernel_library
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.torch_cpu_ops import CpuOps

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
Chosen = Callable[..., tuple[str, str]]
FALLBACK = CpuOps.name if CpuOps.available() else ReferenceOps.name


def test_native_kernels_are_selected_if_available(library: KernelLibrary) -> None:
    choice = select_kernels(CPU, None, SHAPE)
    assert choice.ops.name == NativeOps.name
    assert select_kernels(CPU, torch.bfloat16, SHAPE).ops.name == NativeOps.name


@pytest.mark.parametrize(("arguments", "bits"), [({}, MIXED), ({"x_bits": 8}, 8), ({"x_bits": 16}, 16)])
def test_native_kernels_use_8_bit_activations_except_outliers_by_default(
    library: KernelLibrary, arguments: dict[str, int], bits: int
) -> None:
    ops = select_kernels(CPU, None, SHAPE, **arguments).ops
    assert isinstance(ops, NativeOps)
    assert ops.x_bits == bits


@pytest.mark.parametrize(("kv_bits", "bits"), [(None, 8), (8, 8), (16, 16)])
def test_native_kv_cache_has_8_bits_by_default(library: KernelLibrary, kv_bits: int | None, bits: int) -> None:
    assert select_kernels(CPU, None, SHAPE, kv_bits=kv_bits).ops.kv_bits == bits
    assert select_kernels(CPU, torch.float32, SHAPE, kv_bits=kv_bits).ops.kv_bits == 32


@pytest.mark.parametrize(
    ("options", "trained", "bits"),
    [
        ({}, 8192, 16),
        ({}, 8193, 8),
        ({"context_length": 4096}, 32768, 16),
        ({"context_length": 32768}, 4096, 16),
        ({"kv_dtype": "int8"}, 2048, 8),
        ({"kv_dtype": "unquantized"}, 32768, 16),
    ],
)
def test_kv_cache_has_16_bits_if_the_context_length_is_at_most_8192(
    library: KernelLibrary, options: dict[str, Any], trained: int, bits: int
) -> None:
    config = SHAPE | {"max_position_embeddings": trained}
    assert kernels_for(CPU, EngineOptions(**options), config, half=True).kv_bits == bits


@pytest.mark.parametrize(("options", "head_dim", "bits"), [({}, 128, 8), ({}, 256, 16), ({"kv_dtype": "int8"}, 256, 8)])
def test_kv_cache_has_16_bits_if_a_head_has_more_than_128_numbers(
    library: KernelLibrary, options: dict[str, Any], head_dim: int, bits: int
) -> None:
    config = SHAPE | {"max_position_embeddings": 32768, "head_dim": head_dim}
    assert kernels_for(CPU, EngineOptions(**options), config, half=True).kv_bits == bits


@pytest.mark.parametrize(("kv_dtype", "bits"), [("auto", 16), ("int8", 8)])
def test_kv_cache_of_a_model_with_attention_sinks_has_16_bits_by_default(
    library: KernelLibrary, kv_dtype: Literal["auto", "int8"], bits: int
) -> None:
    config = SHAPE | {"max_position_embeddings": 32768}
    assert kernels_for(CPU, EngineOptions(kv_dtype=kv_dtype), config, half=True, sinks=True).kv_bits == bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_request_for_float32_or_float16_selects_plain_torch_instead_of_native_kernels(dtype: torch.dtype) -> None:
    choice = select_kernels(CPU, dtype, SHAPE)
    assert type(choice.ops) is ReferenceOps
    assert choice.ops.dtype == dtype
    assert choice.reason == f"{str(dtype).removeprefix('torch.')} was requested"


def test_float32_is_selected_on_mps_if_float16_overflows() -> None:
    device = torch.device("mps")
    assert select_kernels(device, None, SHAPE).ops.dtype == torch.float16
    assert select_kernels(device, None, SHAPE, half=False).ops.dtype == torch.float32
    assert select_kernels(device, torch.float16, SHAPE, half=False).ops.dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 250}, "widths (250, 512, 64) are not all multiples of 16"),
        ({"intermediate_size": 500}, "widths (256, 500, 64) are not all multiples of 16"),
        ({"head_dim": 608}, "heads of 608 numbers are larger than 576"),
    ],
)
def test_unsupported_model_shape_selects_plain_torch_and_gives_the_reason(
    library: KernelLibrary, change: dict[str, Any], reason: str
) -> None:
    choice = select_kernels(CPU, None, SHAPE | change)
    assert (choice.ops.name, choice.reason) == (FALLBACK, reason)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """Return a function that chooses kernels under the given environment variables and returns name and reason."""

    def chosen(**environment: str) -> tuple[str, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(kernel_library, "native_kernels", kernel_library.native_kernels.__wrapped__)
        choice = select_kernels(CPU, None, SHAPE)
        return choice.ops.name, choice.reason

    return chosen


def test_plain_torch_replaces_native_kernels_if_there_is_no_c_compiler(tmp_path: Path, chosen: Chosen) -> None:
    name, reason = chosen(PATH="/nonexistent", CC="/nonexistent/cc", HELEXA_CACHE=str(tmp_path))
    assert (name, reason) == (FALLBACK, "no C compiler found; install gcc or clang for faster answers")


def test_error_of_the_c_compiler_is_quoted(tmp_path: Path, chosen: Chosen) -> None:
    cc = script(tmp_path, 'test "$1" = --version && exit 0\necho "no headers here" >&2\nexit 4')
    assert chosen(CC=str(cc), HELEXA_CACHE=str(tmp_path)) == (
        FALLBACK,
        f"the C compiler {cc} failed: no headers here",
    )


def test_error_of_the_compiler_version_check_is_quoted(tmp_path: Path, chosen: Chosen) -> None:
    cc = script(tmp_path, 'echo "license expired" >&2\nexit 4')
    assert chosen(CC=str(cc), HELEXA_CACHE=str(tmp_path)) == (
        FALLBACK,
        f"the C compiler {cc} failed: license expired",
    )


def test_plain_torch_replaces_native_kernels_if_the_compiled_library_cannot_be_loaded(
    tmp_path: Path, chosen: Chosen
) -> None:
    cc = script(tmp_path, GARBAGE)
    name, reason = chosen(CC=str(cc), HELEXA_CACHE=str(tmp_path))
    assert name == FALLBACK
    assert reason.startswith("the native kernels could not be built: ")


def test_unwritable_kernel_cache_folder_is_named_in_the_reason(tmp_path: Path, chosen: Chosen) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    cc = script(tmp_path, "exit 0")
    name, reason = chosen(CC=str(cc), HELEXA_CACHE=str(tmp_path))
    assert name == FALLBACK
    assert reason.startswith("the native kernels could not be built: ")
    assert str(tmp_path / "kernels") in reason


def test_engines_that_start_together_compile_the_kernels_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CC", str(script(tmp_path, f'echo "$1" >> {calls}\n{GARBAGE}')))
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path))
    with ThreadPoolExecutor() as threads:
        engines = [threads.submit(kernel_library.native_kernels.__wrapped__) for _ in range(3)]
    assert {type(engine.exception()) for engine in engines} == {kernel_library.Unavailable}
    arguments = calls.read_text().split()
    assert (arguments.count("--version"), arguments.count("-shared")) == (0, 1)


GARBAGE = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo garbage > "$2"; shift; done'


def script(folder: Path, body: str) -> Path:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("kind", "capability", "half", "dtype"),
    [
        ("cuda", (9, 0), True, "bfloat16"),
        ("cuda", (8, 0), False, "bfloat16"),
        ("cuda", (7, 5), True, "float16"),
        ("cuda", (7, 5), False, "float32"),
        ("cuda", (6, 1), True, "float16"),
        ("mps", None, True, "float16"),
        ("mps", None, False, "float32"),
    ],
)
def test_accelerator_dtype_follows_device_capability_and_overflow_of_the_model(kind, capability, half, dtype):
    assert accelerator_dtype(kind, capability, half=half) == getattr(torch, dtype)
