"""Selection of Triton's kernels."""

import pytest
import torch

from helexa.neuron.ops.kernel_selection import select_kernels

CPU = torch.device("cpu")


def test_triton_kernels_on_a_cpu_require_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_kernels(CPU, torch.float32, {}, kernels="triton").ops.name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    refused = select_kernels(CPU, torch.float32, {}, kernels="triton")
    assert refused.ops.name == "torch"
    assert "interpreter" in refused.reason


def test_triton_kernels_are_not_selected_on_a_cpu_by_default() -> None:
    assert select_kernels(CPU, torch.float32, {}).ops.name == "torch"
