"""Convert errors of the `tokenizers` library."""

from collections.abc import Iterator
from contextlib import contextmanager

from helexa.core.errors import ModelFileError


@contextmanager
def backend_errors(problem: str) -> Iterator[None]:
    """Convert errors of the `tokenizers` library to a `ModelFileError` whose message begins with `problem`.

    The library raises plain `Exception`. A panic of the library raises `PanicException`, a subclass of `BaseException`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(f"{problem}: {' '.join(str(error).split())[:500]}") from error
