"""The interface of API formats, which convert model requests to HTTP bodies and stream events to model events.

Implementations open no connections.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from helexa.acp.providers.provider import ModelEvent, ModelRequest

Json = dict[str, Any]


class Reader(Protocol):
    """Converts the stream events of one response to model events, independent of the API format."""

    def feed(self, event: Json) -> Iterator[ModelEvent]:
        """Yield the model events that correspond to one stream event. An invalid stream event yields none.

        Raises:
            ProviderError: the event reports an error of the endpoint.
        """
        ...

    def end(self) -> Iterator[ModelEvent]:
        """Yield the last model events after the end of the stream.

        If the response is complete, yield `Usage` (if the endpoint reported it) and `End`. If the stream broke off,
        yield nothing.
        """
        ...


class ApiFormat(Protocol):
    """One API format, such as OpenAI chat completions: its paths, request bodies and streamed responses.

    Attributes:
        path: URL path of requests, relative to the base URL.
        models_path: URL path of the model list, relative to the base URL.
        optional: keys of the request body that can be omitted if an endpoint rejects them.
        leaks_markers: whether the response's text may contain reasoning and tool calls between markers such as
            `<think>`, because some servers do not remove reasoning and tool calls from the text.
    """

    path: str
    models_path: str
    optional: tuple[str, ...]
    leaks_markers: bool

    def body(self, request: ModelRequest, endpoint: str, rejected: frozenset[str]) -> Json:
        """Return the JSON body of the HTTP request for a model request.

        Args:
            request: the model request.
            endpoint: name of the endpoint. Data from earlier responses is sent back only to the same endpoint.
            rejected: keys to omit, because the endpoint rejected them.
        """
        ...

    def headers(self, request: ModelRequest) -> dict[str, str]:
        """Return the HTTP headers for `request` that this API format adds to the headers of the connection."""
        ...

    def reader(self, request: ModelRequest, endpoint: str) -> Reader:
        """Return a new object that converts the stream events of the response to `request` to model events."""
        ...


def text_of(value: Any) -> str:
    """If `value` is a string, return it with unpaired surrogates replaced. Otherwise return an empty string."""
    if not isinstance(value, str):
        return ""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def count_of(value: Any) -> int:
    """Return `value` if it is a positive integer, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def object_of(value: Any) -> Json:
    """Return `value` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """Return `value` if it is a list, else an empty list."""
    return value if isinstance(value, list) else []
