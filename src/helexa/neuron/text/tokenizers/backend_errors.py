"""Convert errors of the `tokenizers` library to `ModelFileError`."""

from collections.abc import Iterator
from contextlib import contextmanager

from helexa.core.errors import ModelFileError


@contextmanager
def backend_errors(problem: str) -> Iterator[None]:
    """Convert errors of the `tokenizers` library in a `with` block to a `ModelFileError`.

    The library raises plain `Exception`. A panic of its Rust code raises `PanicException`, a subclass of
    `BaseException`.

    Args:
        problem: beginning of the message of the `ModelFileError`.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(f"{problem}: {' '.join(str(error).split())[:500]}") from error
