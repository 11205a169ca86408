"""Changes fields of a JSON object without reading or writing the values of its other fields."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from helexa.core.errors import malformed_json

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def rewrite(body: bytes, changes: Mapping[str, Any], drop: Collection[str] = ()) -> bytes:
    """Return `body`, a JSON object, with the fields of `changes` set and those in `drop` left out.

    Each name occurs once in the result, with its last value. Names are compared without regard to case where they are
    those of `changes` or `drop`, because some servers (Go's JSON decoder) read `MAX_TOKENS` as `max_tokens`.

    Raises:
        ApiError: 400 `malformed_json`: a name cannot be written again.
    """
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed_json(str(error)) from None
    taken = {*changes, *drop}
    kept: dict[str, Any] = {name: value for name, value in fields.items() if name.casefold() not in taken}
    return msgspec.json.encode(kept | dict(changes))
