"""Finds downloaded models on this machine by name."""

import difflib
from pathlib import Path

from helexa.cli.failure import MODEL_NOT_FOUND, CommandError
from helexa.cli.terminal import printable
from helexa.core.source import ModelSource
from helexa.neuron.config import read_config
from helexa.neuron.sources.inventory import DownloadedModel, downloaded_models
from helexa.neuron.sources.local import local_model as model_at


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
        raise CommandError(f"{printable(name)} is incomplete: {model.missing}; `helexa pull {printable(name)}` goes on")
    return model, model.forms[form] if form else model.path


def downloaded_model(name: str) -> tuple[DownloadedModel, str | None]:
    """Return the downloaded model named `name`, and the quantization that the name selects.

    A name such as `org/name:Q4_K_M` selects a quantization, which is returned as a key of the model's `forms`. For a
    name without a quantization, the second value is None.

    Raises:
        CommandError: the model or the quantization is not downloaded.
    """
    models = models_here()
    for model in models:
        if model.answers_to(name):
            return model, None
    base_name, colon, tag = name.rpartition(":")
    for model in models:
        if colon and model.answers_to(base_name):
            return model, _form(model, tag)
    near = difflib.get_close_matches(name, [model.name for model in models], n=1)
    hint = f"did you mean '{near[0]}'?" if near else "`helexa list` has those that are, `helexa pull` fetches others"
    raise CommandError(f"model '{printable(name)}' is not on this machine; {hint}", MODEL_NOT_FOUND)


def _form(model: DownloadedModel, tag: str) -> str:
    plain = {form.lower().replace("_", ""): form for form in model.forms}
    form = plain.get(tag.lower().replace("_", ""))
    if form is None:
        has = ", ".join(model.forms) or "none that is whole"
        raise CommandError(f"{model.name} is not on this machine in '{printable(tag)}'; here is {has}", MODEL_NOT_FOUND)
    return form


def _path(name: str) -> str | None:
    """Return the path that `name` contains (without `file:`), or None if `name` is a model name."""
    source = ModelSource.parse(name) if name.startswith((".", "/", "~", "file:")) else None
    if source is None and Path(name).suffix.lower() == ".gguf" and Path(name).exists():
        return name
    return source.name if source else None
