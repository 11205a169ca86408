"""`helexa completion`: what a shell needs to complete commands, options and the names of models."""

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

_PATIENCE_SECONDS = 0.2


def completion(
    shell: Literal["bash", "zsh", "fish"],
    /,
    *,
    install: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Print the script that lets a shell complete `helexa`, or put it where the shell finds it.

    Args:
        shell: The shell.
        install: Write the script to the shell's own folder, and let its start-up file read it.
    """
    from helexa.cli import app

    if install:
        print(app.install_completion(shell=shell))
    else:
        print(app.generate_completion(prog_name="helexa", shell=shell))


def model_names(context: "CompletionContext") -> list[str]:
    """The models that are kept on this machine, and those that a server here offers if it says so at once."""
    from contextlib import suppress

    from helexa.cli.gateway import Gateway
    from helexa.cli.local.local_model import models_here
    from helexa.core.errors import HelexaError
    from helexa.neuron.builtin_models import BUILTIN_MODELS

    names = dict.fromkeys(BUILTIN_MODELS)
    with suppress(HelexaError, OSError):
        names |= dict.fromkeys(model.name for model in models_here())
    with suppress(HelexaError):
        offered = Gateway.from_environment(None).models(_PATIENCE_SECONDS)
        names |= dict.fromkeys(str(entry["id"]) for entry in offered)
    return list(names)


ModelName = Annotated[str, Parameter(completer=model_names)]
"""A parameter that takes the name of a model."""
