"""Choose the device for a model, by the model's size and the devices' free memory, before the model is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from helexa.core.fleet import Device
from helexa.neuron.hardware.accelerators import device_health
from helexa.neuron.hardware.discovery import discover, has_apple_silicon, overlooked, torch_version
from helexa.neuron.hardware.host_memory import host_memory

_WORKING_SHARE = 1.2  # factor on the size of a model's files, to include the buffers of a step and a small cache
_WORKING_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device: its name in torch, for example `cuda:0`, and its free memory in bytes."""

    device: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device chosen for a model.

    Attributes:
        device: name of the device in torch.
        reason: why this device was chosen.
        skipped: texts that say why each faster device was not chosen.
    """

    device: str
    reason: str
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join((f"{self.device}: {self.reason}", *self.skipped))


def choose_device(
    model_bytes: int, gpus: Sequence[Gpu], *, mps: bool = False, skipped: Sequence[str] = ()
) -> DeviceChoice:
    """Choose the device on which a model runs.

    If the model fits on the CUDA device with the most free memory, this device is chosen. Otherwise Apple's GPU is
    chosen if the machine has one, else the CPU.

    Args:
        model_bytes: size of the model's files in bytes; 0 if unknown.
        gpus: the usable CUDA devices.
        mps: whether the machine has Apple's GPU (torch's `mps` device).
        skipped: texts that say why other devices cannot be used. They are included in the result.
    """
    needed = int(model_bytes * _WORKING_SHARE) + _WORKING_BYTES
    passed_over = list(skipped)
    for gpu in sorted(gpus, key=lambda gpu: -gpu.free_bytes):
        if gpu.free_bytes >= needed:
            return DeviceChoice(gpu.device, f"{gpu.free_bytes >> 20} MiB free, the most", tuple(passed_over))
        passed_over.append(f"{gpu.device} has {gpu.free_bytes >> 20} MiB free, the model needs {needed >> 20}")
    if mps:
        return DeviceChoice("mps", "Apple's GPU", tuple(passed_over))
    return DeviceChoice("cpu", "no GPU can be used", tuple(passed_over))


def device_for(model_bytes: int) -> DeviceChoice:
    """Choose a device of this machine for a model whose files have `model_bytes` bytes, by the current free memory."""
    facts = discover()
    if torch_version().endswith("+cpu"):
        skipped_devices = [
            f"cuda:{device.index} is not used: torch is installed without CUDA" for device in facts.devices
        ]
        return choose_device(model_bytes, (), mps=has_apple_silicon(), skipped=skipped_devices)
    free_bytes = {device.index: device.vram_free_mb << 20 for device in device_health()} if facts.devices else {}
    gpus = [Gpu(f"cuda:{device.index}", _free(device, free_bytes)) for device in facts.devices]
    reason = facts.cuda_unavailable_reason or overlooked()
    skipped = [f"cuda is not used: {reason}"] if reason else []
    return choose_device(model_bytes, gpus, mps=has_apple_silicon(), skipped=skipped)


def _free(device: Device, free_bytes: Mapping[int, int]) -> int:
    """Return the free memory of `device` in bytes, or the free host memory if the device does not report its memory.

    Args:
        device: the CUDA device.
        free_bytes: free bytes by device index, for the devices that reported them.
    """
    return free_bytes.get(device.index, 0) if device.vram_total_mb else host_memory()[0]
