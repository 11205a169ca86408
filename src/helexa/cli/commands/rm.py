"""`helexa rm`: remove cached models from this machine."""

import sys
from typing import Annotated

from cyclopts import Parameter

from helexa.cli.commands.completion import ModelName
from helexa.cli.failure import USAGE, CommandError
from helexa.cli.local.local_model import downloaded_model
from helexa.cli.terminal import note, printable, size_text
from helexa.neuron.sources.inventory import DownloadedModel
from helexa.neuron.weights.gguf.files import part_names


def rm(
    model: ModelName,
    /,
    *models: ModelName,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    yes: Annotated[bool, Parameter(alias="-y", negative="")] = False,
    quiet: Annotated[bool, Parameter(alias="-q", negative="")] = False,
) -> int:
    """Remove cached models with all their quantizations; `org/name:Q4_K_M` removes one quantization.

    The command asks before it removes. Models that a server or a command on this machine has loaded are not removed.

    Args:
        model: Model name, as in `helexa list`.
        models: Further models.
        dry_run: Print the models to remove, and remove nothing.
        yes: Do not ask. Required if there is no terminal.
        quiet: Do not print the removed models.
    """
    chosen = {(cached.folder, form): cached for cached, form in map(downloaded_model, (model, *models))}
    if not (dry_run or yes or _can_ask()):
        raise CommandError("rm asks before it removes, and there is no terminal to ask on; use --yes", USAGE)
    for (folder, form), cached in chosen.items():
        if form is not None and (folder, None) in chosen:
            continue
        if form is not None and len(cached.forms) == 1:
            form = None  # only small files of the repository would remain
        description = _described(cached, form)
        if dry_run:
            print(f"would remove {description} in {cached.folder}")
        elif yes or _agreed(f"remove {description}? [y/N] "):
            cached.remove() if form is None else cached.remove_form(form)
            if not quiet:
                note(f"removed {description}")
        else:
            note(f"kept {description}")
    return 0


def _described(cached: DownloadedModel, form: str | None) -> str:
    if form is None:
        return f"{printable(cached.name)}, {size_text(cached.size)}"
    path = cached.forms[form]
    parts = (path.with_name(name) for name in part_names(path.name))
    return f"{printable(cached.name)}:{form}, {size_text(sum(file.stat().st_size for file in parts if file.exists()))}"


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _agreed(question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
