"""`helexa rm`: models that are not needed on this machine any more."""

import sys
from typing import Annotated

from cyclopts import Parameter

from helexa.cli.completion import ModelName
from helexa.cli.local_model import kept_model
from helexa.cli.terminal import note, printable, size_text


def rm(
    model: ModelName,
    /,
    *models: ModelName,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    yes: Annotated[bool, Parameter(alias="-y", negative="")] = False,
    quiet: Annotated[bool, Parameter(alias="-q", negative="")] = False,
) -> int:
    """Remove models from this machine, with all their quantisations. On a terminal it asks first.

    Args:
        model: Its name, as `helexa list` has it.
        models: Further ones.
        dry_run: Say what would be removed, and remove nothing.
        yes: Do not ask.
        quiet: Say nothing of what was removed.
    """
    found = {kept.folder: kept for kept in map(kept_model, (model, *models))}
    for kept in found.values():
        what = f"{printable(kept.name)}, {size_text(kept.size)}"
        if dry_run:
            print(f"would remove {what} in {kept.folder}")
        elif yes or _agreed(f"remove {what}? [y/N] "):
            kept.remove()
            if not quiet:
                note(f"removed {what}")
        else:
            note(f"kept {what}")
    return 0


def _agreed(question: str) -> bool:
    """What the person at the terminal says; where there is none, whoever asks has made up their mind."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
