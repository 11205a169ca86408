"""Fields that a backend refuses: optional fields, output limit, reasoning effort."""

import re

import msgspec
import orjson

from helexa.cortex.backends.chat_request import (
    EFFORT,
    NEW_OUTPUT_LIMIT,
    OPTIONAL_FIELDS,
    OUTPUT_LIMIT,
    SAMPLING,
    TOGETHER,
)

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

# An error that names a sampling parameter may be about its value. Only these words say that the parameter is unknown.
_UNKNOWN_FIELD = re.compile(
    rb"un(?:recogni[sz]ed|known|expected|supported)|not (?:supported|permitted|allowed|recogni[sz]ed|available)"
    rb"|extra[_ ](?:inputs|fields|forbidden)|additional propert|cannot find field|deprecated|cannot both be specified",
    re.IGNORECASE,
)


def without_field(body: bytes, name: str) -> bytes:
    """Return the JSON object `body` without the refused field `name`."""
    fields = _fields.decode(body)
    fields.pop(name, None)
    return msgspec.json.encode(fields)


def output_limit(body: bytes) -> int | None:
    """Return the output limit of a translated chat request; None without a limit."""
    fields = _fields.decode(body)
    raw = fields.get(OUTPUT_LIMIT) or fields.get(NEW_OUTPUT_LIMIT)
    limit = None if raw is None else orjson.loads(memoryview(raw))
    return limit if type(limit) is int else None


def with_output_limit(body: bytes, limit: int) -> bytes:
    """Return a chat request with the output limit `limit` in the field `max_tokens`."""
    return msgspec.json.encode(_fields.decode(body) | {OUTPUT_LIMIT: limit})


def refused_fields(body: bytes, error: bytes) -> set[str]:
    """Return the optional fields of `body` that the error response `error` refuses.

    `max_tokens` and sampling parameters are left out if the error is probably about their values.
    """
    # `max_tokens` counts as refused only if the error also names `max_completion_tokens`, the field that replaces it.
    # An error that names only `max_tokens` is probably about its value. If the gateway moved the limit to another field
    # in this case, a backend that ignores unknown fields would generate without a limit.
    named = {
        name
        for name in OPTIONAL_FIELDS
        if f'"{name}":'.encode() in body and re.search(rb"(?<!\w)%b(?!\w)" % name.encode(), error)
    }
    if _UNKNOWN_FIELD.search(error) is None:
        named.difference_update(SAMPLING)
    elif {"temperature", "top_p"} <= named and re.search(rb"\bboth\b|\bonly one\b", error):
        named = named - {"temperature", "top_p"} | {TOGETHER}
    return named if NEW_OUTPUT_LIMIT.encode() in error else named - {OUTPUT_LIMIT}


def refuses_effort(error: bytes) -> bool:
    """Return whether OpenAI's error says that tools need the reasoning effort `none`."""
    return re.search(rb"\btools\b.{0,80}\breasoning_effort\b.{0,200}\bnone\b", error, re.DOTALL) is not None


def without_effort(body: bytes) -> bytes:
    """Return a chat request. If it has tools and no effort, its effort becomes `none`."""
    fields = _fields.decode(body)
    if "tools" not in fields or EFFORT in fields:
        return body
    return msgspec.json.encode(fields | {EFFORT: "none"})


def refuses_thinking(error: bytes) -> bool:
    """Return whether an error of Ollama says that the model lacks the chosen effort."""
    return re.search(rb"does not support thinking|\bthink value\b", error) is not None
