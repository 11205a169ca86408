"""`helexa doctor`: report the hardware and software of this machine, and the device on which models run."""

from typing import Annotated

from cyclopts import Parameter


def doctor(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> int:
    """Report the hardware and software of this machine, the device for models with the reason, and missing parts.

    Exit code 1 means that models cannot run.

    Args:
        as_json: Print JSON for programs.
    """
    from helexa.generation.private import EngineSettings
    from helexa.neuron.doctor.doctor import examine_machine, report
    from helexa.neuron.hardware.device_choice import device_for

    settings = EngineSettings().config()
    device, why = settings.harness.torch.device, "requested"
    if device == "auto":
        choice = device_for(model_bytes=0)
        device, why = choice.device, "; ".join((choice.reason, *choice.skipped))
    return 0 if report(examine_machine(settings, device, why), as_json=as_json) else 1
