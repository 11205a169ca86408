"""Check the operating system, CPU, C compiler and accelerators of this machine."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator

from helexa.core.version import __version__
from helexa.neuron.doctor.check_result import CheckResult
from helexa.neuron.hardware.discovery import broken_driver, discover, overlooked, torch_version
from helexa.neuron.hardware.triton_toolchain import triton_missing
from helexa.neuron.ops.native.machine_code.prebuilt import processor_flags

# Flags in /proc/cpuinfo of the instruction sets that the kernels can use, and their names.
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "asimd": "NEON",
    "asimddp": "NEON dot products",
}


def look_at_machine(device: str) -> Iterator[CheckResult]:
    """Check the operating system, CPU, C compiler, accelerators and NVIDIA driver of this machine.

    Args:
        device: configured device. A broken NVIDIA driver is a `fault` unless `device` is `cpu` or `mps`. `auto` means
            that the node chooses the device.
    """
    facts = discover()
    memory = f"{facts.memory_total_mb} MiB of memory"
    yield CheckResult("machine", "fine", f"helexa {__version__}, Python {platform.python_version()}")
    yield CheckResult("machine", "fine", f"{facts.os} {facts.kernel}, {facts.cpu}, {facts.cpu_cores} cores, {memory}")
    if flags := processor_flags():
        instructions = [name for flag, name in _INSTRUCTIONS.items() if flag in flags]
        if instructions:
            yield CheckResult("machine", "fine", f"instruction sets for kernels: {', '.join(instructions)}")
        else:
            yield CheckResult("machine", "note", "instruction sets for kernels: none; inference will be slow")
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is not None:
        yield CheckResult("compiler", "fine", f"C compiler: {compiler}, {_version(compiler)}")
    yield from _accelerators(device)


def _accelerators(device: str) -> Iterator[CheckResult]:
    facts = discover()
    for accelerator in facts.devices:
        capability = f", compute capability {accelerator.compute_capability}" if accelerator.compute_capability else ""
        yield CheckResult(
            "device",
            "fine",
            f"cuda:{accelerator.index} is {accelerator.name} with {accelerator.vram_total_mb} MiB{capability}",
        )
    if facts.driver_version:
        yield CheckResult(
            "device", "fine", f"NVIDIA driver {facts.driver_version}, for CUDA up to {facts.cuda_version}"
        )
    if facts.unified_accelerator:
        yield CheckResult("device", "fine", f"mps is {facts.unified_accelerator}, with unified memory")
    if (reason := broken_driver()) is not None:
        yield CheckResult("device", "note" if device in ("cpu", "mps") else "fault", reason)
    elif (reason := overlooked()) is not None:
        yield CheckResult("device", "note", reason)
    elif not facts.devices and not facts.unified_accelerator:
        yield CheckResult("device", "fine", "no NVIDIA device was found")
    elif facts.devices and not torch_version().endswith("+cpu"):
        yield from _triton()
    elif facts.devices:
        text = "to make it faster: torch is installed without CUDA; install a CUDA build of torch"
        yield CheckResult("device", "fault" if device.startswith("cuda") else "note", text)


def _triton() -> Iterator[CheckResult]:
    missing = triton_missing()
    if missing is None:
        yield CheckResult("kernels", "fine", "Triton can build kernels for NVIDIA devices")
    else:
        yield CheckResult("kernels", "note", f"to make it faster: {missing}")


def _version(compiler: str) -> str:
    try:
        run = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"which does not work: {error}"
    return (run.stdout.splitlines() or ["unknown version"])[0]
