"""Describe this machine's system, CPU and accelerators, without importing torch and without raising."""

import os
import platform
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from helexa.core.fleet import Discovery
from helexa.neuron.hardware.accelerators import HIDDEN, accelerators
from helexa.neuron.hardware.build_info import installed_version

_DRIVER = Path("/dev/nvidiactl")


@cache
def discover() -> Discovery:
    """Return the hardware facts that do not change during the process's lifetime. The caller sets `max_prompt_tokens`.

    The caller sets `max_prompt_tokens`.
    """
    nvml = accelerators()
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
    )


def default_device() -> str:
    """Return the default device: the CUDA device with the most memory that torch can use, else the CPU."""
    facts = discover()
    if torch_version().endswith("+cpu"):
        return "cpu"
    if facts.devices:
        return f"cuda:{max(facts.devices, key=lambda device: device.vram_total_mb).index}"
    # Loads on `cuda:0` fail and report the driver's problem. On the CPU they would succeed and be slow without notice.
    return "cuda:0" if facts.cuda_unavailable_reason else "cpu"


def overlooked() -> str | None:
    """Return a warning if NVIDIA's driver is present but NVML reports no visible device, else None."""
    facts = discover()
    known = facts.devices or facts.cuda_unavailable_reason or torch_version().endswith("+cpu")
    if known or not _DRIVER.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return None
    return (
        "NVIDIA's driver is installed, but NVML (nvidia-ml-py and libnvidia-ml) reports no visible device, so "
        "'auto' selects the CPU; if torch can use a device, set device = \"cuda\""
    )


def has_apple_silicon() -> bool:
    """Return whether the machine has Apple's GPU with unified memory, torch's `mps` device."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


@cache
def torch_version() -> str:
    """Return the installed version of torch without importing torch; empty if not installed."""
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
