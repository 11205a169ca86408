"""`helexa completion`: shell completion of commands, options and model names."""

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

_TIMEOUT_SECONDS = 0.2


def completion(
    shell: Literal["bash", "zsh", "fish"],
    /,
    *,
    install: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Print the script that lets a shell complete `helexa`, or install the script.

    Args:
        shell: The shell.
        install: Write the script to the shell's own folder, and load it in the shell's start-up file.
    """
    from helexa.cli import app

    if install:
        print(app.install_completion(shell=shell))
    else:
        print(app.generate_completion(prog_name="helexa", shell=shell))


def model_names(context: "CompletionContext") -> list[str]:
    """Return the model names that the shell completes: cached models and models of a local server.

    A local server that does not respond quickly is ignored.
    """
    from contextlib import suppress

    from helexa.cli.gateway import Gateway
    from helexa.cli.local.local_model import models_here
    from helexa.core.errors import HelexaError
    from helexa.neuron.builtin_models import BUILTIN_MODELS

    names = dict.fromkeys(BUILTIN_MODELS)
    with suppress(HelexaError, OSError):
        names |= dict.fromkeys(model.name for model in models_here())
    with suppress(HelexaError):
        offered = Gateway.from_environment(None).models(_TIMEOUT_SECONDS)
        names |= dict.fromkeys(str(entry["id"]) for entry in offered)
    return list(names)


ModelName = Annotated[str, Parameter(completer=model_names)]
"""A parameter for a model name."""
