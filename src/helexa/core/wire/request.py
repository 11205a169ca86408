"""Base classes of request bodies: declared fields are validated strictly, undeclared fields are kept."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from helexa.core.errors import ApiError, invalid_body, malformed_json, missing_model


class WireObject(BaseModel):
    """Base class of all objects in a request: extra fields are kept, types are not coerced, numbers are finite."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    def extra(self, name: str) -> Any:
        """Return the value of an undeclared field, or None if absent."""
        return (self.model_extra or {}).get(name)


class WireRequest(WireObject):
    """Base class of all request bodies that name a model."""

    model: Annotated[str, BeforeValidator(lambda value: "" if value is None else value)] = ""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse a request body.

        Raises:
            ApiError: 400 `malformed_json`, 400 `invalid_request_body` naming the field, 400 `missing_model_field`, or
                400 `unsupported_parameter` naming the parameter.
        """
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise to_api_error(error) from None
        return request._validated()

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> Self:
        """Validate a request that was converted from another API format.

        Raises:
            ApiError: 400 `invalid_request_body`, `missing_model_field` or `unsupported_parameter`.
        """
        try:
            request = cls.model_validate(value)
        except ValidationError as error:
            raise to_api_error(error) from None
        return request._validated()

    def _validated(self) -> Self:
        if not self.model:
            raise missing_model()
        self.reject_unsupported()
        return self

    def reject_unsupported(self) -> None:
        """Raise a 400 `unsupported_parameter` error for the first parameter that helexa does not implement."""


def to_api_error(error: ValidationError) -> ApiError:
    """Return a 400 error that names the first invalid field, or states why the body is not JSON."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return malformed_json(first["ctx"]["error"] if "ctx" in first else first["msg"])
    path = ".".join(str(part) for part in first["loc"] if part != "[key]")[:200]
    return invalid_body(f"{path}: {first['msg']}" if path else first["msg"], path or None)
