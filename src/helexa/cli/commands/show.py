"""`helexa show`: print the properties of a model, read from its files."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from helexa.cli.commands.completion import ModelName
from helexa.cli.terminal import printable, size_text

if TYPE_CHECKING:
    from helexa.neuron.lifecycle.description import Description
    from helexa.neuron.sources.inventory import DownloadedModel


def show(model: ModelName, /, *, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> None:
    """Show the properties of a model from its files on this machine, without loading the model.

    Args:
        model: Model name, as in `helexa list`, or the path of its files.
        as_json: Print JSON for programs.
    """
    from helexa.cli.local.local_model import local_model
    from helexa.neuron.lifecycle.description import describe

    cached, path = local_model(model)
    description = describe(path)
    if as_json:
        source = cached.source if cached else None
        properties = asdict(description) | {"trouble": description.problem}  # former name of `problem`
        print(json.dumps({"model": model, "source": source, "path": str(path), **properties}, indent=2))
        return
    facts = _facts(cached, path, description)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {printable(value)}")


def _facts(cached: "DownloadedModel | None", path: Path, model: "Description") -> dict[str, str]:
    facts: dict[str, str | None] = {
        "model": cached.name if cached else path.name,
        "source": cached.source if cached else None,
        "path": str(path),
        "size": size_text(cached.size) if cached else None,
        "architecture": model.architecture,
        "parameters": _millions(model.parameters) if model.parameters else None,
        "weights": model.weights,
        "context": f"{model.context_length} tokens" if model.context_length else None,
        "tools": _yes(model.tools),
        "reasoning": _yes(model.reasoning),
        "sampling": ", ".join(f"{name} {value:g}" for name, value in model.sampling.items()),
        "licence": model.licence,
        "cannot run": model.problem,
    }
    return {name: value for name, value in facts.items() if value}


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _millions(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 10**9 else f"{count / 1e6:.0f} million"
