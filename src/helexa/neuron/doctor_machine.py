"""Checks of `neuron doctor` of this machine: devices, CPUs, torch, kernels, ranks."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from helexa.core.display import memory_text
from helexa.core.errors import not_installed
from helexa.core.node_reports import Discovery, alike
from helexa.core.version import __version__
from helexa.neuron.config import TorchConfig
from helexa.neuron.hardware.cpus import CpuNode, numa_nodes
from helexa.neuron.hardware.machine_description import (
    broken_driver,
    discover,
    has_gpu_torch,
    has_nvidia_driver,
    overlooked,
    torch_version,
)
from helexa.neuron.hardware.nvidia_gpus import DeviceLink, device_links
from helexa.neuron.hardware.triton_toolchain import triton_missing
from helexa.neuron.kernel_survey import NO_KERNELS, survey_kernels
from helexa.neuron.lifecycle.load_preparation import max_tensor_parallel
from helexa.neuron.ops.native.compilation import processor_flags
from helexa.neuron.options import TorchOptions

Level = Literal["fine", "note", "fault"]

_OWN_DISTANCE = 10  # Linux's distance of a NUMA node to its own memory

_MANAGEMENT = "nvidia-ml-py"  # no CUDA library, but a small Python package that helexa itself needs
_PREFIXES = ("nvidia-", "cuda-")

# Flags in /proc/cpuinfo of the instruction sets that the kernels can use, and their names.
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_int8": "AMX-INT8",
    "asimd": "NEON",
    "asimddp": "NEON dot products",
    "i8mm": "NEON matrix products",
    "bf16": "NEON BF16",
}


class CheckResult(NamedTuple):
    """The result of one check of the machine or node by `neuron doctor`."""

    topic: str
    # `fault` if the problem prevents serving the configured models, `note` if an improvement is possible, `fine` if
    # there is no problem
    level: Level
    text: str  # one sentence that describes the result and, if there is a problem, how to fix it


def look_at_links(device: str, tensor_parallel: int) -> Iterator[CheckResult]:
    """For `neuron doctor`: report the device links and NUMA nodes; check the ranks."""
    facts, nodes = discover(), numa_nodes()
    yield from describe_devices(facts, device_links() if len(facts.devices) > 1 else [])
    yield from describe_numa_nodes(nodes)
    if device.startswith("cuda"):
        yield from describe_gpu_ranks(facts, max_tensor_parallel(device, tensor_parallel, facts))
    elif device == "cpu":
        yield describe_cpu_ranks(len(nodes), tensor_parallel)


def describe_devices(facts: Discovery, links: Sequence[DeviceLink]) -> Iterator[CheckResult]:
    """For `neuron doctor`: report groups of equal devices, and links between devices."""
    if len(facts.devices) > 1:
        groups = [f"{len(group)} x {group[0].name}" for group in alike(facts.devices)]
        yield CheckResult("links", "fine", f"devices that are alike: {', '.join(groups)}")
    pairs: dict[str, list[str]] = {}
    for link in links:
        pairs.setdefault(_connection(link), []).append(f"cuda:{link.first} and cuda:{link.second}")
    for connection, names in pairs.items():
        yield CheckResult("links", "fine", f"{connection}: {', '.join(names)}")


def describe_numa_nodes(nodes: Sequence[CpuNode]) -> Iterator[CheckResult]:
    """For `neuron doctor`: report CPUs, memory, distances of NUMA nodes, if several."""
    if len(nodes) < 2:
        return
    sizes = ", ".join(f"{node.number} ({len(node.cpus)} CPUs, {memory_text(node.memory_mb)})" for node in nodes)
    distances = [node.distances[other.number] for node in nodes for other in nodes if other.number in node.distances]
    farthest = max(distances, default=_OWN_DISTANCE) / _OWN_DISTANCE
    text = f"NUMA nodes: {sizes}"
    if farthest > 1:
        text += f"; access to the memory of another NUMA node takes up to {farthest:g} times as long"
    yield CheckResult("links", "fine", text)


def describe_cpu_ranks(nodes: int, tensor_parallel: int) -> CheckResult:
    """For `neuron doctor`: check if `tensor_parallel` ranks suit `nodes` NUMA nodes."""
    if nodes < 2 and tensor_parallel == 1:
        return CheckResult("links", "fine", "one NUMA node: one rank makes sense (tensor_parallel = 1)")
    if nodes < 2:
        text = f"tensor_parallel is {tensor_parallel}, but there is one NUMA node: 1 rank is usually faster"
        return CheckResult("links", "note", text)
    if tensor_parallel == nodes:
        return CheckResult("links", "fine", f"models run on {nodes} ranks, one per NUMA node")
    text = f"tensor_parallel is {tensor_parallel}; try {nodes}, which is one rank per NUMA node"
    return CheckResult("links", "note", text)


def describe_gpu_ranks(facts: Discovery, most: int) -> Iterator[CheckResult]:
    """For `neuron doctor`: report if a model can be divided among up to `most` GPUs."""
    if len(facts.devices) < 2:
        return
    if most > 1:
        yield CheckResult(
            "links", "fine", f"a model can be divided among up to {most} devices (tensor_parallel = {most})"
        )
    else:
        yield CheckResult(
            "links", "fine", "each model runs on one device; models cannot be divided among these devices"
        )


def _connection(link: DeviceLink) -> str:
    """Return a description of the connection between two devices."""
    parts: list[str] = []
    if link.nvlinks:
        parts.append(f"NVLink ({link.nvlinks} links per device)")
    elif link.nvlinks == 0:
        parts.append("no NVLink")
    if link.path is not None:
        parts.append(f"PCIe through {link.path}")
    if link.peer_access is not None:
        parts.append("direct memory access" if link.peer_access else "no direct memory access")
    return ", ".join(parts) or "unknown connection"


def look_at_torch_build() -> Iterator[CheckResult]:
    """For `neuron doctor`: report unused CUDA libraries on a machine without GPU."""
    if discover().devices or has_nvidia_driver():
        return
    size = cuda_library_bytes(distributions())
    if size:
        yield CheckResult(
            "torch",
            "note",
            f"torch is a CUDA build with {size / 1e9:.1f} GB of libraries for NVIDIA devices, and there is none; "
            "models on CPUs rarely need torch: remove it, or install the CPU build, which is ten times smaller: "
            "`uv pip install --torch-backend cpu --reinstall torch`, or see 'PyTorch' in docs/install.md",
        )


def cuda_library_bytes(installed: Iterable[Distribution]) -> int:
    """For `neuron doctor`: return the size in bytes of the installed NVIDIA libraries."""
    packages = {name.lower().replace("_", "-"): item for item in installed if (name := item.metadata["Name"])}
    return sum(
        file.size or 0
        for name, item in packages.items()
        if name.startswith(_PREFIXES) and name != _MANAGEMENT
        for file in item.files or ()
    )


def look_at_machine(device: str) -> Iterator[CheckResult]:
    """Check operating system, CPU, C compiler, accelerators and NVIDIA's driver.

    Args:
        device: configured device. A broken NVIDIA driver is a `fault` unless `device` is `cpu` or `mps`. `auto` means
            that the node chooses the device.
    """
    facts = discover()
    memory = f"{memory_text(facts.memory_total_mb)} of memory"
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
            f"cuda:{accelerator.index} is {accelerator.name} with {memory_text(accelerator.vram_total_mb)}{capability}",
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
    elif facts.devices and has_gpu_torch():
        yield from _triton()
    elif facts.devices:
        text = "to make inference faster: torch is installed without CUDA; install a CUDA build of torch"
        if not torch_version():
            text = f"to make inference faster: {not_installed('torch', 'gpu')}"
        yield CheckResult("device", "fault" if device.startswith("cuda") else "note", text)


def _triton() -> Iterator[CheckResult]:
    missing = triton_missing()
    if missing is None:
        yield CheckResult("kernels", "fine", "Triton can build kernels for NVIDIA devices")
    else:
        yield CheckResult("kernels", "note", f"to make inference faster: {missing}")


def _version(compiler: str) -> str:
    try:
        run = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"which does not work: {error}"
    return (run.stdout.splitlines() or ["unknown version"])[0]


def look_at_kernels(settings: TorchOptions | TorchConfig, device: str, why: str = "") -> Iterator[CheckResult]:
    """For `neuron doctor`: check torch, every device's kernels, and `device`.

    Args:
        why: reason for the choice of `device`, for the printed text; may be empty.
    """
    if torch_version():
        yield CheckResult("torch", "fine", f"torch {torch_version()}")
        yield from look_at_torch_build()
    elif device == "cpu":
        yield CheckResult("torch", "fine", "torch is not installed: the native kernels do not need it")
    else:
        yield CheckResult("torch", "fault", not_installed("torch", "gpu"))
        return
    try:
        survey = survey_kernels(settings, device)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield CheckResult("kernels", "fault", f"no engine can run: {error}")
        return
    yield from look_at_compiled_modules("numpy" if device == "cpu" else "torch")
    for entry in survey.devices:
        threads = f" on {survey.threads} threads" if entry.device == "cpu" else ""
        free = "" if entry.free_mb is None else f", {memory_text(entry.free_mb)} free"
        text = f"{entry.device}: {entry.kernels} kernels in {entry.dtype}{threads}{free}: {entry.reason}"
        yield CheckResult("kernels", "fine", text)
    cuda = [entry.device for entry in survey.devices if entry.device.startswith("cuda") and entry.kernels != NO_KERNELS]
    if survey.without_access:
        pairs = ", ".join(f"{first} and {second}" for first, second in survey.without_access)
        yield CheckResult("device", "note", f"no direct memory access, data is copied through main memory: {pairs}")
    elif len(cuda) > 1:
        yield CheckResult("device", "fine", f"direct memory access between {', '.join(cuda)}")
    if settings.dtype not in ("auto", "bfloat16"):
        text = (
            f"to make inference faster: dtype is '{settings.dtype}', which the native kernels do not support; "
            "use dtype 'auto'"
        )
        yield CheckResult("kernels", "note", text)
    if survey.unusable:
        yield CheckResult("device", "fault", survey.unusable)
    else:
        dtypes = [f" in {entry.dtype}" for entry in survey.devices if entry.device == device]
        yield CheckResult("device", "fine", f"models run on {device}{''.join(dtypes)}{f' ({why})' if why else ''}")


def look_at_compiled_modules(package: str) -> Iterator[CheckResult]:
    """For `neuron doctor`: report if Python compiles a package again at each start."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or Path(cache_from_source(spec.origin)).exists():
        return
    folder = Path(spec.origin).parent
    if sys.dont_write_bytecode:
        remedy = "unset PYTHONDONTWRITEBYTECODE"
    else:
        command = shlex.join([sys.executable, "-m", "compileall", "-q", str(folder)])
        remedy = f"as a user who may write to its folder, run {command}"
    yield CheckResult(package, "note", f"to make starts faster: each start compiles {package} again; {remedy}")
