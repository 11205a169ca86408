"""Reads the fields of a request body that the gateway needs, and rejects a body that names its model twice.

A server behind the gateway may read another `model` than the gateway has checked if its JSON decoder takes the first of
two members.
"""

from typing import Any, cast

import msgspec

from helexa.core.errors import invalid_body
from helexa.cortex.usage.token_limit import Fields


class _ModelName:
    """The value of `model`, of any type."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _CheckedFields(Fields, kw_only=True):
    model: _ModelName = cast(_ModelName, None)  # as an optional type, it would take null without the hook


class _FieldsReader:
    """The decoder calls a hook for each `model`, however the name is escaped."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_CheckedFields, dec_hook=self._note)
        self._models = 0

    def read(self, body: bytes) -> Fields:
        """Return the fields.

        Raises:
            ApiError: 400: the model is named twice.
            msgspec.DecodeError: the body is not a JSON object.
        """
        self._models = 0
        fields: Fields = self._decoder.decode(body)
        if fields.model is not None:
            fields.model = fields.model.value
        return fields

    def _note(self, kind: type, value: Any) -> _ModelName:
        self._models += 1
        if self._models > 1:
            raise invalid_body("'model' must be given once", "model")
        return _ModelName(value)


read_fields = _FieldsReader().read
