"""One value as one line of JSON, whatever strings are in it."""

from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """A line, its end included. Halves of UTF-16 pairs, as in names of files that are no UTF-8, become U+FFFD."""
    try:
        return _encoder.encode(value) + b"\n"
    except UnicodeEncodeError:
        return _encoder.encode(_whole(msgspec.to_builtins(value))) + b"\n"


def sendable(value: Any) -> Any:
    """The value, if need be without the halves of pairs that would keep it from being sent."""
    try:
        _encoder.encode(value)
    except UnicodeEncodeError:
        return _whole(msgspec.to_builtins(value))
    return value


def _whole(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {_whole(key): _whole(member) for key, member in value.items()}
        case list() | tuple():
            return [_whole(member) for member in value]
        case _:
            return value
