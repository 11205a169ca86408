"""A model of this machine, by the name that a person gave."""

import difflib
from pathlib import Path

from helexa.cli.failure import MODEL_NOT_FOUND, CommandError
from helexa.cli.terminal import printable
from helexa.core.source import ModelSource
from helexa.neuron.sources.inventory import KeptModel, kept_models
from helexa.neuron.sources.local import local_model as model_at


def local_model(name: str) -> tuple[KeptModel | None, Path]:
    """The kept model of that name and where its files are; for a path only the second.

    Raises:
        CommandError: there is none, or something of it is missing.
        SourceError: the path leads to no model.
    """
    if (path := _path(name)) is not None:
        return None, model_at(path)
    model = kept_model(name)
    if model.path is None:
        raise CommandError(f"{printable(name)} is incomplete: {model.lack}; `helexa pull {printable(name)}` goes on")
    return model, model.path


def kept_model(name: str) -> KeptModel:
    """The kept model of that name.

    Raises:
        CommandError: there is none.
    """
    models = kept_models()
    for model in models:
        if model.answers_to(name):
            return model
    near = difflib.get_close_matches(name, [model.name for model in models], n=1)
    hint = f"did you mean '{near[0]}'?" if near else "`helexa list` has those that are, `helexa pull` fetches others"
    raise CommandError(f"model '{printable(name)}' is not on this machine; {hint}", MODEL_NOT_FOUND)


def _path(name: str) -> str | None:
    """The path that `name` is, None where it is a name."""
    source = ModelSource.parse(name) if name.startswith((".", "/", "~", "file:")) else None
    if source is None and Path(name).suffix.lower() == ".gguf" and Path(name).exists():
        return name
    return source.name if source else None
