"""Request bodies: JSON bytes to typed values, lenient about what is unknown and strict about what is known."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from helexa.core.errors import ApiError, invalid_body, malformed_json, missing_model


class WireObject(BaseModel):
    """Base of every object in a request: extra fields are kept, types are not coerced, numbers are finite."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    def extra(self, name: str) -> Any:
        """The value of a field that the schema does not declare, None when it is absent."""
        return (self.model_extra or {}).get(name)


class WireRequest(WireObject):
    """Base of every request body that names a model."""

    model: Annotated[str, BeforeValidator(lambda value: "" if value is None else value)] = ""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a request body.

        Raises:
            ApiError: 400 `malformed_json`, 400 `invalid_request_body` naming the field, 400 `missing_model_field`, or
                400 `unsupported_parameter` naming the parameter.
        """
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise refusal_of(error) from None
        return request._accepted()

    @classmethod
    def of(cls, value: dict[str, Any]) -> Self:
        """Read a request that was made of another dialect's.

        Raises:
            ApiError: as `parse` does.
        """
        try:
            request = cls.model_validate(value)
        except ValidationError as error:
            raise refusal_of(error) from None
        return request._accepted()

    def _accepted(self) -> Self:
        if not self.model:
            raise missing_model()
        self.refuse_unsupported()
        return self

    def refuse_unsupported(self) -> None:
        """Raise `unsupported_parameter` for the first parameter that asks for what helexa does not do."""


def refusal_of(error: ValidationError) -> ApiError:
    """Return a 400 that names the first field that is wrong, or says why the body is not JSON."""
    first_error = error.errors(include_url=False, include_input=False)[0]
    if first_error["type"] == "json_invalid":
        return malformed_json(first_error["ctx"]["error"] if "ctx" in first_error else first_error["msg"])
    path = ".".join(str(part) for part in first_error["loc"] if part != "[key]")[:200]
    return invalid_body(f"{path}: {first_error['msg']}" if path else first_error["msg"], path or None)
