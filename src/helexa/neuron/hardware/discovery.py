"""Describe the operating system, CPU and accelerators of this machine, without importing torch.

The functions raise no errors. Unknown facts are empty, None or replaced by defaults.
"""

import os
import platform
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from helexa.core.fleet import Discovery, NumaNode
from helexa.neuron.hardware.accelerators import HIDDEN, accelerators
from helexa.neuron.hardware.build_info import installed_version
from helexa.neuron.hardware.numa import numa_nodes

_DRIVER = Path("/dev/nvidiactl")


@cache
def discover() -> Discovery:
    """Return the hardware facts of this machine. They are determined once per process.

    The caller sets the fields `max_prompt_tokens` and `max_tensor_parallel`, which depend on the configuration.
    """
    nvml = accelerators()
    nodes = [NumaNode(node=node.number, cpus=len(node.cpus), memory_total_mb=node.memory_mb) for node in numa_nodes()]
    return Discovery(
        hostname=socket.gethostname(),
        os=platform.system(),
        kernel=platform.release(),
        cpu=_cpu_name(),
        cpu_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        memory_total_mb=psutil.virtual_memory().total >> 20,
        cuda_version=nvml.cuda_version,
        driver_version=nvml.driver_version,
        cuda_unavailable_reason=nvml.unavailable,
        unified_accelerator=_cpu_name() if has_apple_silicon() else None,
        devices=nvml.devices,
        numa_nodes=nodes if len(nodes) > 1 else None,
    )


def default_device() -> str:
    """Return the torch name of the default device: the CUDA device with the most memory, or `cpu` without CUDA.

    If NVIDIA's driver is installed but does not work, the result is `cuda:0`.
    """
    facts = discover()
    if torch_version().endswith("+cpu"):
        return "cpu"
    if facts.devices:
        return f"cuda:{max(facts.devices, key=lambda device: device.vram_total_mb).index}"
    # A load on `cuda:0` fails and reports the driver's problem. A load on the CPU would succeed and be slow.
    return "cuda:0" if facts.cuda_unavailable_reason else "cpu"


def broken_driver() -> str | None:
    """Return an error message if NVIDIA's driver is installed but does not work, else None."""
    reason = discover().cuda_unavailable_reason
    return None if reason is None else f"the NVIDIA driver does not work: {reason}"


def overlooked() -> str | None:
    """Return a warning if NVIDIA's driver is loaded but NVML (its management library) reports no device, else None.

    The result is also None if the devices are hidden on purpose or torch is installed without CUDA.
    """
    facts = discover()
    known = facts.devices or facts.cuda_unavailable_reason or torch_version().endswith("+cpu")
    if known or not _DRIVER.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return None
    return (
        "NVIDIA's driver is installed, but NVML (nvidia-ml-py and libnvidia-ml) reports no visible device, so "
        "'auto' selects the CPU; if torch can use a device, set device = \"cuda\""
    )


def has_apple_silicon() -> bool:
    """Return whether this machine has an Apple GPU with unified memory (torch's `mps` device)."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


@cache
def torch_version() -> str:
    """Return the installed version of torch without importing torch; empty if torch is not installed."""
    return installed_version("torch")


@cache
def _cpu_name() -> str:
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            run = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
            return run.stdout.strip()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
