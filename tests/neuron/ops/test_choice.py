"""Which kernels are chosen, and what is said where faster ones are not."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from helexa.neuron.ops.choice import accelerator_dtype, choose
from helexa.neuron.ops.native import compiler
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.native import NativeOps
from helexa.neuron.ops.reference.reference import ReferenceOps
from helexa.neuron.ops.torch_cpu import CpuOps

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
Chosen = Callable[..., tuple[str, str]]
FALLBACK = CpuOps.name if CpuOps.available() else ReferenceOps.name


def test_native_kernels_serve_where_they_can(library: KernelLibrary) -> None:
    choice = choose(CPU, None, SHAPE)
    assert choice.ops.name == NativeOps.name
    assert choose(CPU, torch.bfloat16, SHAPE).ops.name == NativeOps.name


@pytest.mark.parametrize(("width", "asked", "bits"), [(2048, None, 16), (2560, None, 8), (2048, 8, 8), (2560, 16, 16)])
def test_narrow_models_keep_more_of_their_activations(
    library: KernelLibrary, width: int, asked: int | None, bits: int
) -> None:
    ops = choose(CPU, None, SHAPE | {"hidden_size": width}, x_bits=asked).ops
    assert isinstance(ops, NativeOps)
    assert ops.x_bits == bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_whoever_asks_for_a_type_gets_plain_torch_in_it(dtype: torch.dtype) -> None:
    choice = choose(CPU, dtype, SHAPE)
    assert type(choice.ops) is ReferenceOps
    assert choice.ops.dtype == dtype
    assert choice.reason == f"{str(dtype).removeprefix('torch.')} was asked for"


def test_a_model_too_wide_for_float16_gets_float32_where_there_is_nothing_between() -> None:
    device = torch.device("mps")
    assert choose(device, None, SHAPE).ops.dtype == torch.float16
    assert choose(device, None, SHAPE, half=False).ops.dtype == torch.float32
    assert choose(device, torch.float16, SHAPE, half=False).ops.dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 250}, "widths (250, 512, 64) are not all multiples of 16"),
        ({"intermediate_size": 500}, "widths (256, 500, 64) are not all multiples of 16"),
        ({"head_dim": 320}, "heads of 320 in groups of 1 are too large"),
        ({"num_attention_heads": 66, "num_key_value_heads": 2}, "heads of 64 in groups of 33 are too large"),
    ],
)
def test_shapes_that_the_kernels_do_not_take_are_said(
    library: KernelLibrary, change: dict[str, Any], reason: str
) -> None:
    choice = choose(CPU, None, SHAPE | change)
    assert (choice.ops.name, choice.reason) == (FALLBACK, reason)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """Name and reason, as a process that starts with these variables has it."""

    def chosen(**environment: str) -> tuple[str, str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(compiler, "native_kernels", compiler.native_kernels.__wrapped__)
        choice = choose(CPU, None, SHAPE)
        return choice.ops.name, choice.reason

    return chosen


def test_without_a_compiler_plain_torch_serves(tmp_path: Path, chosen: Chosen) -> None:
    name, reason = chosen(PATH="/nonexistent", CC="/nonexistent/cc", HELEXA_CACHE=str(tmp_path))
    assert (name, reason) == (FALLBACK, "no C compiler found; install gcc or clang for faster answers")


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, chosen: Chosen) -> None:
    cc = script(tmp_path, 'test "$1" = --version && exit 0\necho "no headers here" >&2\nexit 4')
    assert chosen(CC=str(cc), HELEXA_CACHE=str(tmp_path)) == (
        FALLBACK,
        f"{cc} failed: no headers here",
    )


def test_a_compiler_that_cannot_even_say_its_version_is_quoted(tmp_path: Path, chosen: Chosen) -> None:
    cc = script(tmp_path, 'echo "license expired" >&2\nexit 4')
    assert chosen(CC=str(cc), HELEXA_CACHE=str(tmp_path)) == (
        FALLBACK,
        f"{cc} failed: license expired",
    )


def test_a_compiler_whose_output_cannot_be_loaded_is_no_compiler(tmp_path: Path, chosen: Chosen) -> None:
    cc = script(tmp_path, GARBAGE)
    name, reason = chosen(CC=str(cc), HELEXA_CACHE=str(tmp_path))
    assert name == FALLBACK
    assert reason.startswith("the native kernels could not be built: ")


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, chosen: Chosen) -> None:
    (tmp_path / "kernels").write_text("a file where the folder should be")
    cc = script(tmp_path, "exit 0")
    name, reason = chosen(CC=str(cc), HELEXA_CACHE=str(tmp_path))
    assert name == FALLBACK
    assert reason.startswith("the native kernels could not be built: ")
    assert str(tmp_path / "kernels") in reason


def test_engines_that_start_together_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    monkeypatch.setenv("CC", str(script(tmp_path, f'echo "$1" >> {asked}\n{GARBAGE}')))
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path))
    with ThreadPoolExecutor() as threads:
        engines = [threads.submit(compiler.native_kernels.__wrapped__) for _ in range(3)]
    assert {type(engine.exception()) for engine in engines} == {compiler.Unavailable}
    said = asked.read_text().split()
    assert (said.count("--version"), said.count("-shared")) == (3, 1)


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
def test_the_dtype_follows_from_what_the_device_can_do_and_the_model_bears(kind, capability, half, dtype):
    assert accelerator_dtype(kind, capability, half=half) == getattr(torch, dtype)
