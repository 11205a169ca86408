"""Encodes values as lines of JSON, including strings with lone surrogates."""

from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """Return the value as one line of JSON that ends with a line break. Lone surrogates become U+FFFD."""
    try:
        return _encoder.encode(value) + b"\n"
    except UnicodeEncodeError:
        return _encoder.encode(_without_lone_surrogates(msgspec.to_builtins(value))) + b"\n"


def sendable(value: Any) -> Any:
    """Return a JSON value in which U+FFFD replaces lone surrogates, which cannot be encoded as UTF-8."""
    try:
        _encoder.encode(value)
    except UnicodeEncodeError:
        return _without_lone_surrogates(msgspec.to_builtins(value))
    return value


def _without_lone_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {_without_lone_surrogates(key): _without_lone_surrogates(member) for key, member in value.items()}
        case list() | tuple():
            return [_without_lone_surrogates(member) for member in value]
        case _:
            return value
