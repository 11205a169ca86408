"""`helexa list`: list the models that are downloaded to this machine."""

import json
import time
from typing import Annotated

from cyclopts import Parameter

from helexa.cli.local.local_model import models_here
from helexa.cli.terminal import note, size_text
from helexa.core.text_table import text_table
from helexa.neuron.sources.inventory import DownloadedModel

_HEADINGS = ("MODEL", "FORM", "SIZE", "FETCHED")
_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


def list_models(*, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """List the cached models of this machine; `helexa ps` lists the models that servers have loaded.

    Args:
        as_json: Print JSON for programs.
    """
    models = models_here()
    if as_json:
        print(json.dumps([_facts(model) for model in models], indent=2))
    elif models:
        print(text_table(_HEADINGS, [_row(model) for model in models], right=("SIZE",)))
    else:
        note("no model is downloaded on this machine; download one with `helexa pull`")


def _row(model: DownloadedModel) -> tuple[str, str, str, str]:
    form = ", ".join(model.forms) if model.path else "incomplete"
    return model.name, form, size_text(model.size), _ago(time.time() - model.fetched)


def _facts(model: DownloadedModel) -> dict[str, object]:
    return {
        "model": model.name,
        "source": model.source,
        "path": str(model.path) if model.path else None,
        "forms": list(model.forms),
        "size_bytes": model.size,
        "fetched": int(model.fetched),
        "lacks": model.missing or None,
    }


def _ago(seconds: float) -> str:
    for unit, length in _UNITS:
        if seconds >= length:
            count = int(seconds / length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
