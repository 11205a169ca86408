"""Classification of device errors and out-of-memory errors; debug faults."""

from pathlib import Path

import pytest
import torch

from debug_fault import Fault, Faults
from helexa.core.errors import HelexaError
from helexa.neuron.engine.execution.device_errors import OutOfMemoryCounter, is_device_fault, is_out_of_memory


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
        (RuntimeError("shape mismatch; this is not a CUDA error"), False, False),
        (ValueError("CUDA error: text of a request"), False, False),
        (torch.OutOfMemoryError("CUDA out of memory"), False, True),
        (caused(RuntimeError("x"), MemoryError()), False, True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), False, True),
        (ValueError("cannot allocate memory for a name"), False, False),
    ],
)
def test_device_and_memory_errors_are_recognized_along_the_chain_of_causes(
    error: Exception, device: bool, memory: bool
):
    assert (is_device_fault(error), is_out_of_memory(error)) == (device, memory)


def test_error_with_a_cyclic_chain_of_causes_is_classified_without_an_endless_loop():
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    assert not is_device_fault(first)


def test_third_out_of_memory_error_in_a_row_reaches_the_limit_for_ending_the_engine():
    strikes = OutOfMemoryCounter()
    assert [strikes.strike(), strikes.strike()] == [False, False]
    strikes.reset()
    assert [strikes.strike(), strikes.strike(), strikes.strike()] == [False, False, True]


def test_failed_allocation_of_torch_on_the_cpu_is_recognized_as_out_of_memory():
    # An allocation of this size always fails. On a CPU, torch raises a plain RuntimeError for it.
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60)
    assert is_out_of_memory(refused.value)


# Debug faults


def faults(text: str, model: str = "/models/SmolLM2.gguf") -> Faults:
    return Faults.from_environment(Path(model), {"TEST_ENGINE_FAULTS": text})


@pytest.mark.parametrize(
    "text", ["exit", "exit@", "leave@load", "exit@step", "exit@step=0", "exit@step=x", "nan@load", "exit@file=", "@"]
)
def test_invalid_specification_of_an_injected_fault_is_rejected(text: str):
    with pytest.raises(HelexaError, match=r"is not a fault; use"):
        faults(text)


def test_injected_fault_can_be_limited_to_one_model():
    text = "SmolLM2:exit@load,other:hang@load,nan@step=3"
    assert faults(text)._faults == [Fault("exit", "load", ""), Fault("nan", "step", "3")]
    assert faults("")._faults == []


@pytest.mark.parametrize(
    ("text", "steps"), [("exit@step=3", [3]), ("exit@every=4", [4, 8]), ("exit@load", []), ("exit@token=1", [])]
)
def test_injected_fault_happens_at_the_configured_steps(text: str, steps: list[int]):
    fault = Fault.parse(text)
    assert [step for step in range(1, 11) if fault.due(step, [])] == steps


def test_fault_injected_by_a_trigger_file_happens_once(tmp_path: Path):
    fault = Fault.parse(f"exit@file={tmp_path}/now")
    assert not fault.due(1, [])
    (tmp_path / "now").touch()
    assert fault.due(2, [])
    assert not fault.due(3, [])
