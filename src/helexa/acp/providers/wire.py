"""The protocol of wire APIs: conversion of requests to bodies, and of stream events to model events.

Implementations open no connections.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from helexa.acp.providers.provider import ModelEvent, ModelRequest

Json = dict[str, Any]


class Reader(Protocol):
    """Converts the stream events of one answer to model events."""

    def feed(self, event: Json) -> Iterator[ModelEvent]:
        """Yield the model events of one stream event; invalid events yield none.

        Raises:
            ProviderError: the event reports an error of the endpoint.
        """
        ...

    def end(self) -> Iterator[ModelEvent]:
        """End the stream of events.

        If the answer is complete, yield `Usage` (if the endpoint reported it) and `End`, else yield nothing.
        """
        ...


class Wire(Protocol):
    """One wire API: the format of its requests and of its streamed answers.

    Attributes:
        path: path of requests, below the base URL.
        models_path: path of the model list, below the base URL.
        optional: body keys that can be omitted if an endpoint rejects them.
        leaks_markers: whether servers of this API may leave reasoning and calls in the answer's text, between markers
            such as `<think>`.
    """

    path: str
    models_path: str
    optional: tuple[str, ...]
    leaks_markers: bool

    def body(self, request: ModelRequest, endpoint: str, rejected: frozenset[str]) -> Json:
        """Return the request body for `endpoint`, without the rejected keys in `rejected`."""
        ...

    def headers(self, request: ModelRequest) -> dict[str, str]:
        """Return the headers of `request` that this wire API adds to the headers of the connection."""
        ...

    def reader(self, request: ModelRequest, endpoint: str) -> Reader:
        """Return an object that converts the stream events of the answer to `request` to model events."""
        ...


def text_of(value: Any) -> str:
    """Return `value` if it is a string, with unpaired surrogates replaced, else an empty string."""
    if not isinstance(value, str):
        return ""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def count_of(value: Any) -> int:
    """Return `value` if it is a positive integer, else 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def object_of(value: Any) -> Json:
    """Return `value` if it is an object, else an empty object."""
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """Return `value` if it is a list, else an empty list."""
    return value if isinstance(value, list) else []
