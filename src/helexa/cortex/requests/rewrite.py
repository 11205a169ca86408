"""Changes fields of a JSON object without parsing or serializing the values of its other fields."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from helexa.core.errors import invalid_body, malformed_json

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def rewrite(
    body: bytes,
    changes: Mapping[str, Any],
    drop: Collection[str] = (),
    known: Collection[str] = (),
    rejected: Collection[str] = (),
) -> bytes:
    """Return the JSON object `body` with the fields in `changes` set and the fields in `drop` removed.

    If `body` contains a field several times, the result contains the field once, with its last value.

    Some servers ignore letter case: Go's JSON decoder reads `MAX_TOKENS` as `max_tokens`. Fields whose names differ
    only by letter case from a name in `changes`, `drop` or `known` are therefore removed.

    Raises:
        ApiError: 400 because `body` is not a JSON object, or because a field name differs only by letter case from a
            name in `rejected`.
    """
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed_json(str(error)) from None
    if rejected:
        for name in fields:
            if name not in rejected and name.casefold() in rejected:
                raise invalid_body(f"'{name.casefold()}' must be written in lower case", name.casefold())
    replaced = {*changes, *drop}
    remaining_fields: dict[str, Any] = {
        name: value
        for name, value in fields.items()
        if name in known or ((folded := name.casefold()) not in replaced and folded not in known)
    }
    for name in drop:
        remaining_fields.pop(name, None)
    return msgspec.json.encode(remaining_fields | dict(changes))
