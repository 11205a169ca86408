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
    exact: Collection[str] = (),
    refused: Collection[str] = (),
) -> bytes:
    """Return `body`, a JSON object, with the fields of `changes` set and the fields of `drop` removed.

    Each name occurs once in the result, with its last value. Other spellings of the names in `changes`, `drop` and
    `exact` are removed, because some servers (Go's JSON decoder) read `MAX_TOKENS` as `max_tokens`.

    Raises:
        ApiError: 400: the body has another spelling of a name in `refused`, or a name that cannot be serialized again.
    """
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed_json(str(error)) from None
    if refused:
        for name in fields:
            if name not in refused and name.casefold() in refused:
                raise invalid_body(f"'{name.casefold()}' must be written in lower case", name.casefold())
    replaced = {*changes, *drop}
    kept_fields: dict[str, Any] = {
        name: value
        for name, value in fields.items()
        if name in exact or ((folded := name.casefold()) not in replaced and folded not in exact)
    }
    for name in drop:
        kept_fields.pop(name, None)
    return msgspec.json.encode(kept_fields | dict(changes))
