"""Starts a command's engine process before the command is parsed.

The start of the process and the imports of the command take a tenth of a second each, so they run at the same time.
This module imports little, so that the process starts at once.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec

from helexa.generation.environment import BASE_URL, LOCAL_URLS

_COMMANDS = ("chat", "generate", "run")
_OTHER_TARGET = ("--help", "-h", "--url", "--version")
_CONNECT_SECONDS = 0.2


def start_engine_early(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Start an engine process if the command will probably use a private engine.

    If the command does not use the process, the process ends with the command.
    """
    if needs_engine(arguments, environ) and has_engine_packages():
        from helexa.neuron.engine_client.early_start import start_early

        with suppress(OSError):  # the command tries again later, and reports the error then
            start_early()


def needs_engine(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether a command will probably use a private engine.

    A command uses a private engine with `--private`, or if it selects no server and none runs on this machine.

    Args:
        arguments: the command line of `helexa`, without the program.
    """
    if not arguments or arguments[0] not in _COMMANDS:
        return False
    if any(argument.partition("=")[0] in _OTHER_TARGET for argument in arguments):
        return False
    return "--private" in arguments or not (environ.get(BASE_URL) or any(map(_is_served, LOCAL_URLS)))


def has_engine_packages() -> bool:
    """Return whether the extra `neuron`, for private engines, is installed.

    Without the extra, an engine process would end with a traceback.
    """
    return all(find_spec(package) is not None for package in ("psutil", "tokenizers"))


def _is_served(url: str) -> bool:
    import socket  # most commands do not need it

    host, _, port = url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
