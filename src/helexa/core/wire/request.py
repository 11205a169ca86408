"""Base classes of request bodies. Declared fields are validated strictly. Undeclared fields are kept unchecked."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from helexa.core.errors import ApiError, invalid_body, malformed_json, missing_model


class WireObject(BaseModel):
    """Base class of all JSON objects in a request. Undeclared fields are kept, and wrong types are not converted."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    def extra(self, name: str) -> Any:
        """Return the value of a field that the class does not declare, or None if the request has no such field."""
        return (self.model_extra or {}).get(name)


class WireRequest(WireObject):
    """Base class of all request bodies. Each request names a model."""

    model: Annotated[str, BeforeValidator(lambda value: "" if value is None else value)] = ""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse and validate a JSON request body.

        Raises:
            ApiError: 400 because the body is not JSON (`malformed_json`), a field is invalid (`invalid_request_body`),
                no model is named (`missing_model_field`), or a parameter is not supported (`unsupported_parameter`).
        """
        try:
            request = cls.model_validate_json(body)
        except ValidationError as error:
            raise to_api_error(error) from None
        return request._validated()

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> Self:
        """Validate a request that was converted from another API format, and return it as an object of this class.

        Raises:
            ApiError: 400 because a field is invalid (`invalid_request_body`), no model is named
                (`missing_model_field`), or a parameter is not supported (`unsupported_parameter`).
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
        """Raise a 400 error for the first parameter that helexa does not implement. Subclasses extend this check."""


def to_api_error(error: ValidationError) -> ApiError:
    """Convert pydantic's error to a 400 error that names the first invalid field, or says why the body is not JSON."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return malformed_json(first["ctx"]["error"] if "ctx" in first else first["msg"])
    path = ".".join(str(part) for part in first["loc"] if part != "[key]")[:200]
    return invalid_body(f"{path}: {first['msg']}" if path else first["msg"], path or None)
