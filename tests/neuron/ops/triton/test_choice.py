"""When Triton's kernels are chosen."""

import pytest
import torch

from helexa.neuron import ops

CPU = torch.device("cpu")


def test_they_run_on_a_cpu_only_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.choose(CPU, torch.float32, {}, kernels="triton").ops.name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    refused = ops.choose(CPU, torch.float32, {}, kernels="triton")
    assert refused.ops.name == "torch"
    assert "interpreter" in refused.reason


def test_nobody_gets_them_on_a_cpu_unasked() -> None:
    assert ops.choose(CPU, torch.float32, {}).ops.name == "torch"
