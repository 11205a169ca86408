"""Downloaded models, and the model that `helexa run` offers for this machine."""

import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from helexa.cli.gateway_client import Gateway
from helexa.cli.terminal_output_and_errors import MODEL_NOT_FOUND, USAGE, CommandError, note, printable
from helexa.core.display import memory_text
from helexa.core.errors import HelexaError
from helexa.core.known_models import KnownModel, known_models
from helexa.core.model_source_ids import ModelSource, suggestion, typed_source
from helexa.generation.environment import LOCAL_URLS
from helexa.generation.target_choice import DEFAULT_MODEL
from helexa.neuron.config import read_config
from helexa.neuron.sources.downloaded_models import DownloadedModel, downloaded_models
from helexa.neuron.sources.hubs_and_sources import local_model as model_at

# Maximum GB of weights that a model on the CPU may read for each token. A model that reads more generates only a few
# tokens per second.
_FASTEST_READ_GB = 5.5


@dataclass(frozen=True)
class FreeMemory:
    """Free memory of a device (such as `cpu` or `cuda:0`) in GB of 2^30 bytes."""

    gb: float
    device: str

    def __str__(self) -> str:
        return f"{memory_text(self.gb * 1024)} of memory free" + ("" if self.device == "cpu" else f" on {self.device}")

    def fits(self, model: KnownModel) -> bool:
        """Return whether the free memory is at least the estimated need of `model`."""
        return model.memory_gb <= self.gb

    def best(self) -> KnownModel:
        """Return the known model that `helexa run` should offer the user.

        It is the largest model marked `offered` that fits this memory, and on the CPU reads at most `_FASTEST_READ_GB`
        for each token. If there is none, return the smallest known model.
        """
        fast = [model for model in known_models() if self.device != "cpu" or model.read_gb <= _FASTEST_READ_GB]
        fitting = [model for model in fast if model.offered and self.fits(model)]
        return fitting[-1] if fitting else known_models()[0]


def free_memory() -> FreeMemory:
    """Return the free memory of the CUDA GPU for models, or else of the host."""
    from helexa.neuron.hardware.device_choice import device_for
    from helexa.neuron.hardware.host_memory import host_memory
    from helexa.neuron.hardware.nvidia_gpus import device_health

    device = device_for(model_bytes=0).device
    for gpu in device_health() if device.startswith("cuda") else ():
        if device == f"cuda:{gpu.index}":
            return FreeMemory(gpu.vram_free_mb / 1024, device)
    return FreeMemory(host_memory()[0] / 2**30, "cpu")


def models_here() -> list[DownloadedModel]:
    """Return the models that are downloaded to this machine.

    Models from hubs other than Hugging Face are included if `NEURON_` environment variables configure the hubs.
    """
    return downloaded_models(read_config(None))


def local_model(name: str) -> tuple[DownloadedModel | None, Path]:
    """Return the downloaded model named `name`, and the path of its files.

    If `name` is a path, return None and the path of the model's files.

    Raises:
        CommandError: the model is not downloaded, or the download is incomplete.
        SourceError: there is no model at the path.
    """
    if (path := _path(name)) is not None:
        return None, model_at(path)
    model, form = downloaded_model(name)
    if model.path is None:
        raise CommandError(
            f"{printable(name)} is incomplete: {model.missing}; resume with `helexa pull {printable(name)}`"
        )
    return model, model.forms[form] if form else model.path


def downloaded_model(name: str) -> tuple[DownloadedModel, str | None]:
    """Return the downloaded model named `name`, and its quantization.

    A name such as `org/name:Q4_K_M` selects a quantization, which is returned as a key of the model's `forms`. For a
    name without a quantization, the second value is None.

    Raises:
        CommandError: the model or the quantization is not downloaded.
    """
    models = models_here()
    typed, name = name, typed_source(name)
    for model in models:
        if model.answers_to(name):
            return model, None
    base_name, colon, tag = name.rpartition(":")
    for model in models:
        if colon and model.answers_to(base_name):
            return model, _form(model, tag)
    near = suggestion(typed, [model.name for model in models])
    hint = near or "`helexa list` lists the downloaded models, `helexa pull` downloads others"
    raise CommandError(f"model '{printable(typed)}' is not on this machine; {hint}", MODEL_NOT_FOUND)


def _form(model: DownloadedModel, tag: str) -> str:
    plain = {form.lower().replace("_", ""): form for form in model.forms}
    form = plain.get(tag.lower().replace("_", ""))
    if form is None:
        others = f"name one of {', '.join(model.forms)}, or " if model.forms else ""
        raise CommandError(
            f"quantization '{printable(tag)}' of {model.name} is not on this machine; "
            f"{others}download it with `helexa pull {model.name}:{printable(tag)}`",
            MODEL_NOT_FOUND,
        )
    return form


def _path(name: str) -> str | None:
    """Return the path in `name` (without `file:`), or None for a model name."""
    name = typed_source(name)
    return ModelSource.parse(name).name if name.startswith((".", "/", "~", "file:")) else None


_LIST_SECONDS = 2.0


def offered_model(*, ask: bool, private: bool = False, quiet: bool = False) -> str:
    """Return the model to run if the user named none, and print why.

    The model is the first of these:

    1. a model that a server on this machine has loaded,
    2. without a terminal, the default model,
    3. the model `FreeMemory.best`, if it is on this machine, or if it fits on the disk and the user agrees to its
       download,
    4. the largest known model that fits the free memory and is on this machine.

    Args:
        ask: whether there is a terminal on which the user can be asked.
        private: whether a private engine must run the model, so that loaded models of servers do not matter.
        quiet: whether to omit the note in the cases 1 and 2.

    Raises:
        CommandError: the model in case 3 is not downloaded, and no other known model that fits is on this machine.
    """
    if not private and (loaded := _loaded_model()) is not None:
        if not quiet:
            note(f"no model named: running {loaded[0]}, which {loaded[1]} has loaded")
        return loaded[0]
    if not ask:
        if not quiet:
            note(f"no model named: running {DEFAULT_MODEL}, whose answers are often wrong; see `helexa models`")
        return DEFAULT_MODEL
    memory = free_memory()
    best = memory.best()
    if _is_here(best):
        note(f"no model named: {best.label} is the best model that fits ({memory})")
        return best.name
    note(f"no model named. The best model that fits ({memory}) is {best.label}: {best.good_for}")
    note("`helexa models` lists other models")
    if _has_disk(best) and _agreed(f"download {best.name} ({best.size_gb:.1f} GB)? [Y/n] "):
        return best.name
    for model in reversed(known_models()):
        if memory.fits(model) and _is_here(model):
            note(f"running {model.label}, which is on this machine")
            return model.name
    raise CommandError(
        "no model to run: no download was started, and no suggested model that fits is on this machine; name a model, "
        "as in `helexa run helexa/small`",
        USAGE,
    )


def _loaded_model() -> tuple[str, str] | None:
    """Return the first loaded model of a local server and the server's URL, else None."""
    for url in LOCAL_URLS:
        with suppress(HelexaError):
            for entry in Gateway(url, os.environ.get("HELEXA_API_KEY")).models(_LIST_SECONDS):
                if entry.get("loaded") is not False:
                    return printable(entry["id"]), url
    return None


def _is_here(model: KnownModel) -> bool:
    with suppress(HelexaError, OSError):
        cached, form = downloaded_model(model.name)
        return cached.path is not None and (form is not None or ":" not in model.name)
    return False


def _has_disk(model: KnownModel) -> bool:
    """Return whether the disk of the model cache has space for the files of `model`.

    If there is too little space, print a note.
    """
    from helexa.neuron.cache_folder import default_cache

    folder = default_cache()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    if free > model.size_gb:
        return True
    note(f"{folder} has only {free:.1f} GB of free disk space; the model needs {model.size_gb:.1f} GB")
    return False


def _agreed(question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().lower() in ("\n", "y\n", "yes\n")  # the end of input means no
