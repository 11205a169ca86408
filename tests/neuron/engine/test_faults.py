"""Faults of devices, told from those of requests; and those that are made on purpose."""

from pathlib import Path

import pytest
import torch

from helexa.core.errors import HelexaError
from helexa.neuron.engine.debug_fault import Fault, Faults
from helexa.neuron.engine.execution.device_errors import Strikes, is_device_fault, is_out_of_memory


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def raised_while(error: Exception, context: Exception) -> Exception:
    error.__context__ = context
    return error


@pytest.mark.parametrize(
    ("error", "device", "memory"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True, False),
        (caused(ValueError("shapes"), torch.AcceleratorError("gone")), True, False),
        (raised_while(KeyError("x"), caused(ValueError("y"), torch.AcceleratorError("gone"))), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), True, False),
        (RuntimeError("shape mismatch; a CUDA error this is not"), False, False),
        (ValueError("CUDA error: so a request says"), False, False),
        (torch.OutOfMemoryError("CUDA out of memory"), False, True),
        (caused(RuntimeError("x"), MemoryError()), False, True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), False, True),
        (ValueError("cannot allocate memory for a name"), False, False),
    ],
)
def test_errors_are_told_by_type_along_the_chain_of_causes(error: Exception, device: bool, memory: bool):
    assert (is_device_fault(error), is_out_of_memory(error)) == (device, memory)


def test_a_chain_that_goes_in_circles_ends():
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    assert not is_device_fault(first)


def test_three_strikes_in_a_row_are_too_many():
    strikes = Strikes()
    assert [strikes.out(), strikes.out()] == [False, False]
    strikes.sound()
    assert [strikes.out(), strikes.out(), strikes.out()] == [False, False, True]


def test_an_out_of_memory_step_that_was_provoked_is_one():
    # It must be possible to allocate nothing like that; torch has no type for it on a CPU.
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60)
    assert is_out_of_memory(refused.value)


# --- on purpose


def faults(text: str, model: str = "/models/SmolLM2.gguf") -> Faults:
    return Faults.of(Path(model), {"NEURON_DEBUG_FAULT": text})


@pytest.mark.parametrize(
    "text", ["exit", "exit@", "leave@load", "exit@step", "exit@step=0", "exit@step=x", "nan@load", "exit@file=", "@"]
)
def test_a_fault_that_is_none_is_refused(text: str):
    with pytest.raises(HelexaError, match=r"is no fault$"):
        faults(text)


def test_a_fault_may_be_for_one_model():
    text = "SmolLM2:exit@load,other:hang@load,nan@step=3"
    assert faults(text)._faults == [Fault("exit", "load", ""), Fault("nan", "step", "3")]
    assert faults("")._faults == []


@pytest.mark.parametrize(
    ("text", "steps"), [("exit@step=3", [3]), ("exit@every=4", [4, 8]), ("exit@load", []), ("exit@token=1", [])]
)
def test_when_a_fault_is_due(text: str, steps: list[int]):
    fault = Fault.parse(text)
    assert [step for step in range(1, 11) if fault.due(step, [])] == steps


def test_a_file_strikes_once(tmp_path: Path):
    fault = Fault.parse(f"exit@file={tmp_path}/now")
    assert not fault.due(1, [])
    (tmp_path / "now").touch()
    assert fault.due(2, [])
    assert not fault.due(3, [])
