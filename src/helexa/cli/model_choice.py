"""Selects the model that a command uses on a gateway."""

import difflib

from helexa.cli.failure import MODEL_NOT_FOUND, CommandError
from helexa.cli.gateway import Gateway
from helexa.cli.terminal import note, printable


def choose_model(gateway: Gateway, wanted: str | None, *, quiet: bool = False) -> str:
    """Return the name of the model to use on a gateway.

    The name is `wanted` if given, else the first loaded model in the gateway's list, else the first model in the list.
    If the model is not loaded yet, print a note, except if `quiet` is set.

    Raises:
        CommandError: the gateway does not list `wanted`, or lists no models.
    """
    models = {entry["id"]: bool(entry.get("loaded")) for entry in gateway.models()}
    if not models:
        raise CommandError(f"the gateway at {gateway.url} has no models", MODEL_NOT_FOUND)
    name = wanted or next((name for name, loaded in models.items() if loaded), next(iter(models)))
    if name not in models:
        near = difflib.get_close_matches(name, models, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(sorted(models)[:20])}"
        raise CommandError(printable(f"model '{name}' not found; {hint}"), MODEL_NOT_FOUND)
    if not models[name] and not quiet:
        note(printable(f"{name} is not loaded yet: its first answer will take longer"))
    return name
