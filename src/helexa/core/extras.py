"""Error messages for missing optional dependencies. They name the extra to install: `pip install helexa[EXTRA]`."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from helexa.core.errors import HelexaError

_EXTRAS = ("acp", "bench", "neuron")
"""Extras that belong to one package: the package below `helexa` has the same name as its extra."""


def missing_extra(error: BaseException) -> str | None:
    """Return a message that names the missing module and the `pip` command that installs it.

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
    return f"{cause.name} is not installed; install it with: pip install 'helexa[{extra}]'"


@contextmanager
def explained_extras() -> Iterator[None]:
    """Return a context manager that converts the `ModuleNotFoundError` of a missing extra to a `HelexaError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (hint := missing_extra(error)) is None:
            raise
        raise HelexaError(hint) from error
