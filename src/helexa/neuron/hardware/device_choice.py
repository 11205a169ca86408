"""On which device a model runs, and in which dtype: decided from facts alone, before anything is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from helexa.core.fleet import Device
from helexa.neuron.hardware.accelerators import device_health
from helexa.neuron.hardware.discovery import discover, has_apple_silicon, overlooked, torch_version
from helexa.neuron.hardware.host_memory import host_memory

_WORKING_SHARE = 1.2  # of a model's files: what it takes with what a step and a small cache need
_WORKING_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device: its name to torch, and how much of its memory is free."""

    device: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device, why it was chosen, and why better ones were not."""

    device: str
    reason: str
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join((f"{self.device}: {self.reason}", *self.skipped))


def choose_device(
    model_bytes: int, gpus: Sequence[Gpu], *, mps: bool = False, skipped: Sequence[str] = ()
) -> DeviceChoice:
    """The CUDA device with the most free memory if the model fits there, else Apple's, else the CPU.

    Args:
        model_bytes: of the model's files, 0 if that is not known.
        skipped: what is known to be wrong with devices that are not among these.
    """
    needed = int(model_bytes * _WORKING_SHARE) + _WORKING_BYTES
    passed_over = list(skipped)
    for gpu in sorted(gpus, key=lambda gpu: -gpu.free_bytes):
        if gpu.free_bytes >= needed:
            return DeviceChoice(gpu.device, f"{gpu.free_bytes >> 20} MiB free, the most", tuple(passed_over))
        passed_over.append(f"{gpu.device} has {gpu.free_bytes >> 20} MiB free, the model needs {needed >> 20}")
    if mps:
        return DeviceChoice("mps", "Apple's accelerator", tuple(passed_over))
    return DeviceChoice("cpu", "the processor", tuple(passed_over))


def device_for(model_bytes: int) -> DeviceChoice:
    """The choice on this machine, as it is now."""
    facts = discover()
    if torch_version().endswith("+cpu"):
        named = [f"cuda:{one.index} is not used: this torch is built for CPUs alone" for one in facts.devices]
        return choose_device(model_bytes, (), mps=has_apple_silicon(), skipped=named)
    told = {one.index: one.vram_free_mb << 20 for one in device_health()} if facts.devices else {}
    gpus = [Gpu(f"cuda:{one.index}", _free(one, told)) for one in facts.devices]
    reason = facts.cuda_unavailable_reason or overlooked()
    skipped = [f"cuda is not used: {reason}"] if reason else []
    return choose_device(model_bytes, gpus, mps=has_apple_silicon(), skipped=skipped)


def _free(device: Device, told: Mapping[int, int]) -> int:
    """Bytes: as it tells. One that never tells of its memory computes in the host's, as far as is known."""
    return told.get(device.index, 0) if device.vram_total_mb else host_memory()[0]
