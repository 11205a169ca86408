"""Reads the fields of a request body that the gateway needs, and rejects a body with the key `model` twice.

If a JSON object contains a key twice, some decoders use the first value and others the last. A node could therefore use
another model than the model that the gateway has authorized.
"""

from typing import Any, cast

import msgspec

from helexa.core.errors import invalid_body
from helexa.cortex.usage.token_limit import Fields


class _ModelName:
    """The value of the key `model` in a request body. The value may have any JSON type."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _CheckedFields(Fields, kw_only=True):
    model: _ModelName = cast(_ModelName, None)  # not optional: an optional type would accept null without the hook


class _FieldsReader:
    """Reads fields of a request body with a JSON decoder that calls a hook for each key `model`.

    The hook counts the keys `model`. It is also called if letters of the key are escaped, as in `\\u006dodel`.
    """

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_CheckedFields, dec_hook=self._count_model)
        self._model_count = 0

    def read(self, body: bytes) -> Fields:
        """Return the fields of the body that the gateway needs.

        Raises:
            ApiError: 400 if the body contains the key `model` twice.
            msgspec.DecodeError: the body is not a JSON object.
        """
        self._model_count = 0
        fields: Fields = self._decoder.decode(body)
        if fields.model is not None:
            fields.model = fields.model.value
        return fields

    def _count_model(self, value_type: type, value: Any) -> _ModelName:
        self._model_count += 1
        if self._model_count > 1:
            raise invalid_body("'model' must be given once", "model")
        return _ModelName(value)


read_fields = _FieldsReader().read
