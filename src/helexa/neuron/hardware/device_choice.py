"""Choose a device for a model by size and free memory, or a node's default device."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helexa.core.display import memory_text
from helexa.neuron.hardware.host_memory import host_memory
from helexa.neuron.hardware.nvidia_gpus import accelerators, device_health, has_nvidia_driver

if TYPE_CHECKING:
    from helexa.core.node_reports import Device

_WORKING_SHARE = 1.2  # factor on the size of a model's files, to include the buffers of a step and a small cache
_WORKING_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device: its name in torch and its free bytes."""

    device: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device chosen for a model."""

    device: str
    reason: str
    skipped: tuple[str, ...] = ()  # texts that say why each faster device was not chosen

    def __str__(self) -> str:
        return "; ".join((f"{self.device}: {self.reason}", *self.skipped))


def choose_device(
    model_bytes: int, gpus: Sequence[Gpu], *, mps: bool = False, skipped: Sequence[str] = ()
) -> DeviceChoice:
    """Choose the device on which a model runs.

    The choice is the CUDA device with the most free memory if the model fits there, else Apple's GPU if there is one,
    else the CPU.

    Args:
        model_bytes: size of the model's files in bytes; 0 if unknown.
        mps: whether torch can use a GPU of Apple.
        skipped: texts that say why other devices cannot be used. They are included in the result.
    """
    needed = int(model_bytes * _WORKING_SHARE) + _WORKING_BYTES
    passed_over = list(skipped)
    for gpu in sorted(gpus, key=lambda gpu: -gpu.free_bytes):
        free = memory_text(gpu.free_bytes >> 20)
        if gpu.free_bytes >= needed:
            return DeviceChoice(gpu.device, f"{free} free, the most", tuple(passed_over))
        passed_over.append(f"{gpu.device} has {free} free, the model needs {memory_text(needed >> 20)}")
    if mps:
        return DeviceChoice("mps", "Apple's GPU", tuple(passed_over))
    return DeviceChoice("cpu", "no GPU can be used", tuple(passed_over))


def device_for(model_bytes: int) -> DeviceChoice:
    """Choose a device for a model of `model_bytes` bytes by the current free memory."""
    facts = accelerators()
    if not (facts.devices or facts.unavailable or has_nvidia_driver() or sys.platform == "darwin"):
        return choose_device(model_bytes, ())
    # Imported only here, because machines without a GPU do not need this import and are faster without it.
    from helexa.neuron.hardware.machine_description import has_apple_silicon, has_gpu_torch, overlooked, torch_version

    if not has_gpu_torch():
        reason = "torch is installed without CUDA" if torch_version() else "torch is not installed"
        skipped_devices = [f"cuda:{device.index} is not used: {reason}" for device in facts.devices]
        mps = bool(torch_version()) and has_apple_silicon()
        return choose_device(model_bytes, (), mps=mps, skipped=skipped_devices)
    free_bytes = {device.index: device.vram_free_mb << 20 for device in device_health()} if facts.devices else {}
    gpus = [Gpu(f"cuda:{device.index}", _free(device, free_bytes)) for device in facts.devices]
    reason = facts.unavailable or overlooked()
    skipped = [f"cuda is not used: {reason}"] if reason else []
    return choose_device(model_bytes, gpus, mps=has_apple_silicon(), skipped=skipped)


def _free(device: "Device", free_bytes: Mapping[int, int]) -> int:
    """Return a device's free bytes; the host's free bytes if it reports no memory."""
    return free_bytes.get(device.index, 0) if device.vram_total_mb else host_memory()[0]


def default_device() -> str:
    """Return torch's name of the default device: a CUDA device or `cpu`.

    The default is the CUDA device with the most memory. It is `cpu` if torch is not installed or is a CPU build.
    Otherwise, without a CUDA device, it is `cuda:0` if NVIDIA's driver is installed but does not work, else `cpu`.
    """
    from helexa.neuron.hardware.machine_description import (  # slow; private engines do not need it
        discover,
        has_gpu_torch,
    )

    facts = discover()
    if not has_gpu_torch():
        return "cpu"
    if facts.devices:
        return f"cuda:{max(facts.devices, key=lambda device: device.vram_total_mb).index}"
    # A load on `cuda:0` fails and reports the driver's problem. A load on the CPU would succeed and be slow.
    return "cuda:0" if facts.cuda_unavailable_reason else "cpu"
