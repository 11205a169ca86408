"""OpenAI's own types, strictly: no conversion of types, no members that they do not have."""

from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_MORE = {
    *("store", "name"),  # OpenAI sends these beside its types
    *("frequency_penalty", "presence_penalty", "bytes"),  # Open Responses demands these; `bytes` of logprobs in events
    "helexa_timing",
}


def response(data: bytes | str) -> Response:
    """A whole response."""
    read = Response.model_validate_json(data, strict=True)
    _no_strangers(read)
    return read


def event(data: bytes | str) -> Any:
    """The data of an event of a stream."""
    read = _EVENT.validate_json(data, strict=True)
    _no_strangers(read)
    return read


def _no_strangers(value: object) -> None:
    if isinstance(value, BaseModel):
        assert not (value.model_extra or {}).keys() - _MORE, (type(value), value.model_extra)
        for name in type(value).model_fields:
            _no_strangers(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            _no_strangers(one)
