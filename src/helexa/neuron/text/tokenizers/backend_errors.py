"""Failures of the `tokenizers` library."""

from collections.abc import Iterator
from contextlib import contextmanager

from helexa.core.errors import ModelFileError


@contextmanager
def backend_errors(problem: str) -> Iterator[None]:
    """Whatever the library raises inside becomes a ModelFileError that begins with `problem`.

    It raises nothing narrower than Exception, and what panics in it raises what is not even that.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(f"{problem}: {' '.join(str(error).split())[:500]}") from error
