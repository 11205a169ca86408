"""The port of wire APIs: a question becomes the body of a request, the events of a stream become a model's events.

Pure: nothing here opens a connection.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from helexa.acp.providers.provider import ModelEvent, ModelRequest

Json = dict[str, Any]


class Reader(Protocol):
    """Reads the events of one answer."""

    def feed(self, event: Json) -> Iterator[ModelEvent]:
        """What an event says. One that makes no sense says nothing.

        Raises:
            ProviderError: the endpoint says that it failed.
        """
        ...

    def end(self) -> Iterator[ModelEvent]:
        """The stream is over: its Usage, as far as it was told, and End; nothing where the answer is not complete."""
        ...


class Wire(Protocol):
    """One dialect.

    Attributes:
        path: where questions are asked, below the base URL.
        models_path: where models are listed.
        optional: the keys of a body that can be left out, should an endpoint refuse them.
        leaks_marks: whether servers of this dialect leave thoughts and calls in the text, as marks.
    """

    path: str
    models_path: str
    optional: tuple[str, ...]
    leaks_marks: bool

    def body(self, request: ModelRequest, endpoint: str, refused: frozenset[str]) -> Json:
        """The body of a request to an endpoint that has refused some keys."""
        ...

    def headers(self, request: ModelRequest) -> dict[str, str]:
        """Further headers of a request."""
        ...

    def reader(self, request: ModelRequest, endpoint: str) -> Reader:
        """Reads the answer to a request."""
        ...


def text_of(value: Any) -> str:
    """A string of a foreign answer, fit to be written anywhere; empty where it is none."""
    if not isinstance(value, str):
        return ""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def count_of(value: Any) -> int:
    """A number of tokens of a foreign answer; 0 where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def object_of(value: Any) -> Json:
    """An object of a foreign answer; empty where it is none."""
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """A list of a foreign answer; empty where it is none."""
    return value if isinstance(value, list) else []
