"""`helexa rm`: remove models from disk, unloading them from servers first."""

import sys
from contextlib import suppress
from typing import Annotated

from cyclopts import Parameter

from helexa.cli.commands.load_and_unload import unload_one
from helexa.cli.flags_and_completion import ModelName, Quiet
from helexa.cli.local_model import downloaded_model
from helexa.cli.terminal_output_and_errors import USAGE, CommandError, note, printable
from helexa.cli.up_state_keys_and_logs import RunningUp, running_ups
from helexa.core.display import file_size_text
from helexa.neuron.sources.downloaded_models import DownloadedModel
from helexa.neuron.sources.local_models import names_of
from helexa.neuron.weights.gguf.files import part_names


def rm(
    model: ModelName,
    /,
    *models: ModelName,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y", "--force", "-f"], negative="")] = False,
    quiet: Quiet = False,
) -> int:
    """Remove cached models, or one quantization (`org/name:Q4_K_M`).

    The command asks before it removes. A model that a `helexa up` on this machine has loaded is unloaded first. Models
    that another program on this machine has loaded are not removed.

    Args:
        model: Model name, as in `helexa list`.
        models: Further models.
        dry_run: Print what the command would do, and remove nothing.
        yes: Do not ask. Required if there is no terminal.
        quiet: Do not print the removed models.
    """
    chosen = {(cached.folder, form): cached for cached, form in map(downloaded_model, (model, *models))}
    if not (dry_run or yes or _can_ask()):
        raise CommandError("no terminal to confirm the removal; add --yes to remove without confirmation", USAGE)
    for (folder, form), cached in chosen.items():
        if form is not None and (folder, None) in chosen:
            continue
        if form is not None and len(cached.forms) == 1:
            form = None  # Remove the whole model: without its only quantization, only small files would remain.
        _remove(cached, form, dry_run=dry_run, yes=yes, quiet=quiet)
    return 0


def _remove(cached: DownloadedModel, form: str | None, *, dry_run: bool, yes: bool, quiet: bool) -> None:
    """Unload and remove a model or one of its quantizations.

    Ask the user first, unless `yes` is set. If `dry_run` is set, only print what would be done. Otherwise, a
    `CommandError` means that another program uses the model.
    """
    description = _described(cached, form)
    obstacle = cached.obstacle(form)
    holders = _holders(cached, form) if obstacle is not None else []
    if obstacle is not None and not holders:
        if not dry_run:
            raise CommandError(obstacle)
        print(f"would not remove {description}: {obstacle}")
        return
    steps = [f"unload {loaded} from {up.url}" for up, loaded in holders]
    where = f" in {cached.folder}" if form is None else f": {cached.forms[form]}"
    if dry_run:
        print(f"would {' and '.join([*steps, f'remove {description}{where}'])}")
        return
    if not (yes or _agreed(f"{' and '.join([*steps, f'remove {description}'])}? [y/N] ")):
        note(f"kept {description}")
        return
    for up, loaded in holders:
        unload_one(up.gateway(), loaded)
        if not quiet:
            note(f"unloaded {printable(loaded)} from {up.url}")
    cached.remove() if form is None else cached.remove_form(form)
    if not quiet:
        note(f"removed {description}")


def _holders(cached: DownloadedModel, form: str | None) -> list[tuple[RunningUp, str]]:
    """Return each responding `helexa up` that has loaded the model, and the model id."""
    names = names_of(cached, form)
    found: list[tuple[RunningUp, str]] = []
    for up in running_ups():
        with suppress(CommandError):  # the server is starting or ending
            loaded = dict.fromkeys(info.id for node in up.gateway().node_reports() for info in node.models)
            found += [(up, model) for model in loaded if model in names]
    return found


def _described(cached: DownloadedModel, form: str | None) -> str:
    if form is None:
        return f"{printable(cached.name)}, {file_size_text(cached.size)}"
    path = cached.forms[form]
    parts = (path.with_name(name) for name in part_names(path.name))
    size = sum(file.stat().st_size for file in parts if file.exists())
    return f"{printable(cached.name)}:{form}, {file_size_text(size)}"


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _agreed(question: str) -> bool:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
