"""Describe this machine and the installed versions, without importing torch."""

import os
import platform
import re
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from helexa.core.node_reports import Discovery, NumaNode
from helexa.core.version import build_identity
from helexa.neuron.hardware.cpus import numa_nodes
from helexa.neuron.hardware.host_memory import memory_id
from helexa.neuron.hardware.nvidia_gpus import HIDDEN, accelerators, has_nvidia_driver


@cache
def build_facts() -> dict[str, Any]:
    """Return the fields of `GET /version`: builds of helexa, Python, torch, Triton.

    The first call runs git if helexa runs from a git checkout. Later calls return the same result.
    """
    torch = _torch_facts()
    return build_identity() | {
        "python_version": platform.python_version(),
        "torch_version": _installed_version("torch"),
        "torch_cuda": torch.get("cuda"),
        "torch_hip": torch.get("hip"),
        "triton_version": _installed_version("triton") or None,
        "target": f"{platform.machine()}-{sys.platform}",
    }


def _installed_version(package: str) -> str:
    """Return the installed version of `package`; empty if not installed."""
    try:
        text = metadata.distribution(package).read_text("METADATA") or ""
    except metadata.PackageNotFoundError:
        return ""
    # Not `metadata.version`, which is slower because it parses the whole text as an email.
    version = re.search(r"^Version: *(.+)$", text, re.MULTILINE)
    return version[1].strip() if version else ""


def _torch_facts() -> dict[str, str]:
    """Return the string constants of `torch/version.py` without importing torch."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (OSError, metadata.PackageNotFoundError):
        return {}
    return dict(re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE))


@cache
def discover() -> Discovery:
    """Return this machine's CPUs, devices and versions, determined once per process.

    All calls return the same object. The caller sets the fields that depend on the configuration, such as
    `max_prompt_tokens`, in a copy.
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
        machine=memory_id(),
    )


def broken_driver() -> str | None:
    """Return an error if NVIDIA's installed driver does not work, else None."""
    reason = discover().cuda_unavailable_reason
    return None if reason is None else f"the NVIDIA driver does not work: {reason}"


def overlooked() -> str | None:
    """Return a warning if NVIDIA's driver is loaded but NVML reports no device.

    The result is None if NVML reports a device or an error, if the devices are hidden on purpose, or if torch is not
    installed or has no CUDA.
    """
    facts = discover()
    known = facts.devices or facts.cuda_unavailable_reason or not has_gpu_torch()
    if known or not has_nvidia_driver() or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return None
    return (
        "NVIDIA's driver is installed, but NVML (nvidia-ml-py and libnvidia-ml) reports no visible device, so "
        "'auto' selects the CPU; if torch can use a device, set device = \"cuda\""
    )


def has_apple_silicon() -> bool:
    """Return whether this machine has Apple's GPU (torch's `mps`)."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


@cache
def torch_version() -> str:
    """Return the installed version of torch; empty if it is not installed."""
    return _installed_version("torch")


def has_gpu_torch() -> bool:
    """Return whether torch is installed, and is not the build for CPUs only."""
    version = torch_version()
    return bool(version) and not version.endswith("+cpu")


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
