"""Selection of Triton's kernels."""

import pytest
import torch

from helexa.neuron.ops.kernel_selection import select_kernels

CPU = torch.device("cpu")


def test_cpu_requires_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_kernels(CPU, torch.float32, {}, kernels="triton").ops.name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    refused = select_kernels(CPU, torch.float32, {}, kernels="triton")
    assert refused.ops.name == "torch"
    assert "interpreter" in refused.reason


def test_cpu_does_not_choose_triton_by_default() -> None:
    assert select_kernels(CPU, torch.float32, {}).ops.name == "torch"
