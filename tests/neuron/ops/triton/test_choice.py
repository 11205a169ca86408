"""When Triton's kernels are chosen."""

import pytest
import torch

from helexa.neuron.ops.choice import choose

CPU = torch.device("cpu")


def test_they_run_on_a_cpu_only_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(CPU, torch.float32, {}, kernels="triton").ops.name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    refused = choose(CPU, torch.float32, {}, kernels="triton")
    assert refused.ops.name == "torch"
    assert "interpreter" in refused.reason


def test_nobody_gets_them_on_a_cpu_unasked() -> None:
    assert choose(CPU, torch.float32, {}).ops.name == "torch"
