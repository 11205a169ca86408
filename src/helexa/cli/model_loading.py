"""Loads a model on a server or in a private engine, and shows the progress."""

import difflib
import logging
from dataclasses import replace

from helexa.cli.download_bar import DownloadBar
from helexa.cli.failure import CommandError, exit_code
from helexa.cli.flags import TargetFlags
from helexa.cli.gateway import Gateway
from helexa.cli.model_choice import choose_model
from helexa.cli.terminal import note, printable
from helexa.core.errors import HelexaError, SourceError
from helexa.generation.model import Model
from helexa.generation.target import Target
from helexa.generation.targets import DEFAULT_MODEL


def load_model(
    target_flags: TargetFlags, name: str | None, *, checked: bool = False, quiet: bool = False, verbose: bool = False
) -> tuple[Model, Target]:
    """Load a model, and return it with the server or private engine that runs it.

    Args:
        target_flags: command line options that select the server or private engine.
        name: model name, or None for the default model.
        checked: whether to reject a name that the server does not list. If False, the name is sent to the server,
            which may also accept names that it does not list.
        quiet: whether to show no progress.
        verbose: whether to print where the model runs.

    Raises:
        HelexaError: the model could not be downloaded or loaded. If the name is misspelled, the message suggests a
            known name.
    """
    location = target_flags.location(name)
    if location.url is not None and not location.is_private and (checked or location.wanted_model is None):
        gateway = Gateway.from_environment(location.url)
        location = replace(location, model=choose_model(gateway, location.wanted_model, quiet=quiet))
    if verbose:
        _log_to_stderr()
    model = Model(location)
    try:
        with DownloadBar(location.wanted_model or DEFAULT_MODEL, quiet=quiet) as bar:
            target = model.open(bar.show)
    except SourceError as error:
        raise with_hint(error, location.wanted_model or "") from error
    if verbose:
        note(printable(f"{target.model}: {target.name}"))
    return model, target


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(printable(record.getMessage()))


def _log_to_stderr() -> None:
    """Set up logging so that the library's log messages of level INFO and above are printed on stderr."""
    log = logging.getLogger("helexa.generation")
    log.setLevel(logging.INFO)
    log.handlers = [_StderrHandler()]
    log.propagate = False


def with_hint(error: SourceError, name: str) -> HelexaError:
    """Return an error that suggests a known model name if `name` is similar to it, else return `error`."""
    from helexa.cli.local.local_model import models_here
    from helexa.neuron.builtin_models import BUILTIN_MODELS

    known = dict.fromkeys([*BUILTIN_MODELS, *(model.name for model in models_here())])
    near = difflib.get_close_matches(name, known, n=1) if name not in known else []
    return CommandError(f"{error}; did you mean '{near[0]}'?", exit_code(error)) if near else error
