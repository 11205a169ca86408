"""Loads a model at its target and shows the progress."""

import difflib
import logging
from dataclasses import replace

from helexa.cli.download_bar import DownloadBar
from helexa.cli.failure import CommandError, exit_code
from helexa.cli.flags import Where
from helexa.cli.gateway import Gateway
from helexa.cli.model_choice import choose_model
from helexa.cli.terminal import note, printable
from helexa.core.errors import HelexaError, SourceError
from helexa.generation.model import Model
from helexa.generation.target import Target
from helexa.generation.targets import DEFAULT_MODEL


def opened(
    where: Where, name: str | None, *, checked: bool = False, quiet: bool = False, verbose: bool = False
) -> tuple[Model, Target]:
    """Load a model (the default model if `name` is None) and return it with its target.

    Args:
        where: target options.
        name: model name, or None.
        checked: whether to reject a name that the server does not list. If not, the server decides, because a server
            may accept names that it does not list.
        quiet: show no progress.
        verbose: print where the model runs.

    Raises:
        HelexaError: the model could not be loaded or fetched; for a misspelled name, the message suggests a known name.
    """
    place = where.place(name)
    if place.url is not None and not place.is_private and (checked or place.wanted_model is None):
        gateway = Gateway.from_environment(place.url)
        place = replace(place, model=choose_model(gateway, place.wanted_model, quiet=quiet))
    if verbose:
        _tell_all()
    model = Model(place)
    try:
        with DownloadBar(place.wanted_model or DEFAULT_MODEL, quiet=quiet) as bar:
            target = model.open(bar.show)
    except SourceError as error:
        raise with_hint(error, place.wanted_model or "") from error
    if verbose:
        note(printable(f"{target.model}: {target.name}"))
    return model, target


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(printable(record.getMessage()))


def _tell_all() -> None:
    """Print the library's log messages of level INFO and above on stderr."""
    log = logging.getLogger("helexa.generation")
    log.setLevel(logging.INFO)
    log.handlers = [_Notes()]
    log.propagate = False


def with_hint(error: SourceError, name: str) -> HelexaError:
    """Return the error with a suggestion if `name` is similar to a known name."""
    from helexa.cli.local.local_model import models_here
    from helexa.neuron.builtin_models import BUILTIN_MODELS

    known = dict.fromkeys([*BUILTIN_MODELS, *(model.name for model in models_here())])
    near = difflib.get_close_matches(name, known, n=1) if name not in known else []
    return CommandError(f"{error}; did you mean '{near[0]}'?", exit_code(error)) if near else error
