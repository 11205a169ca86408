"""Error messages for missing optional dependencies, with the command that installs the extra."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from helexa.core.errors import HelexaError

_EXTRAS = ("acp", "bench", "neuron")
"""Extras that belong to one package: the package below `helexa` has the same name as its extra."""


def missing_extra(error: BaseException) -> str | None:
    """Return a message that names the missing module and the command that installs it.

    The result is None if `error` was not caused by a missing optional dependency.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    if cause is None or cause.name is None or cause.name.partition(".")[0] == "helexa":
        return None
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(cause.__traceback__)]
    packages = [module.split(".")[1] for module in modules if module.startswith("helexa.")]
    extra = packages[-1] if packages and packages[-1] in _EXTRAS else "all"
    return not_installed(cause.name, extra)


def not_installed(module: str, extra: str) -> str:
    """Return the message for the missing `module` of `extra`, with the command that fits the installation."""
    return f"{module} is not installed; install it with: {_install_command(f'helexa[{extra}]')}"


def _install_command(requirement: str) -> str:
    """Return the command of the tool that created the environment of this process."""
    environment = Path(sys.prefix)
    if (environment / "uv-receipt.toml").exists():
        return f"uv tool install '{requirement}'"
    if (environment / "pipx_metadata.json").exists():
        return f"pipx install --force '{requirement}'"
    if environment.parent.name.startswith("archive-v"):  # uv keeps the environments of uvx in its cache
        return f"uvx '{requirement}'"
    if find_spec("pip") is None and _created_by_uv(environment):
        return f"uv pip install '{requirement}'"
    return f"pip install '{requirement}'"


def _created_by_uv(environment: Path) -> bool:
    try:
        lines = (environment / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        return False
    return any(line.partition("=")[0].strip() == "uv" for line in lines)


@contextmanager
def explained_extras() -> Iterator[None]:
    """Return a context manager that converts the `ModuleNotFoundError` of a missing extra to a `HelexaError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (hint := missing_extra(error)) is None:
            raise
        raise HelexaError(hint) from error
