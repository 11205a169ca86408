"""Validate responses against the types of the `openai` package, without type conversion and unknown fields."""

from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_MORE = {
    *("store", "name"),  # sent by OpenAI, missing in its types
    *("frequency_penalty", "presence_penalty", "bytes"),  # required by Open Responses; `bytes` in the events' logprobs
    "helexa_timing",
}


def response(data: bytes | str) -> Response:
    """Return a response body, validated."""
    read = Response.model_validate_json(data, strict=True)
    _no_strangers(read)
    return read


def event(data: bytes | str) -> Any:
    """Return the data of one stream event, validated."""
    read = _EVENT.validate_json(data, strict=True)
    _no_strangers(read)
    return read


def _no_strangers(value: object) -> None:
    if isinstance(value, BaseModel):
        assert not (value.model_extra or {}).keys() - _MORE, (type(value), value.model_extra)
        for name in type(value).model_fields:
            _no_strangers(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _no_strangers(item)
