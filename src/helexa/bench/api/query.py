"""Parses and validates URL query parameters. Unknown parameters are errors."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from helexa.core.errors import ApiError

_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Parameter:
    """Definition of one URL query parameter.

    Attributes:
        about: description for users.
        kind: type of the value.
        default: value if the parameter is missing or empty.
        least: smallest allowed integer.
        most: largest allowed integer.
        choices: allowed texts. If empty, every text is allowed.
        required: True if a request without the parameter is rejected.
    """

    about: str
    kind: Literal["text", "integer", "boolean"] = "text"
    default: Any = None
    least: int = 0
    most: int = 2**53
    choices: tuple[str, ...] = ()
    required: bool = False

    def read(self, name: str, text: str | None) -> Any:
        """Parse the text of the parameter `name` and return its value.

        Args:
            name: name of the parameter, for error messages.
            text: text from the URL, or None if the parameter is missing.

        Raises:
            ApiError: status 400, if `text` is invalid, or is missing although the parameter is required.
        """
        if not text:
            if self.required:
                raise _wrong(name, "is needed")
            return self.default
        if len(text) > _LONGEST or "\0" in text:
            raise _wrong(name, "is too long")
        if self.choices and text not in self.choices:
            raise _wrong(name, f"is one of {', '.join(self.choices)}")
        if self.kind == "boolean":
            if text.lower() not in _BOOLEANS:
                raise _wrong(name, "is true or false")
            return _BOOLEANS[text.lower()]
        if self.kind == "integer":
            if not (text.isascii() and text.isdigit() and self.least <= int(text) <= self.most):
                raise _wrong(name, f"is a whole number from {self.least} to {self.most}")
            return int(text)
        return text

    def schema(self) -> dict[str, Any]:
        """Return a JSON Schema that describes the parameter's value, for the OpenAPI document."""
        if self.kind == "integer":
            schema: dict[str, Any] = {"type": "integer", "minimum": self.least, "maximum": self.most}
        elif self.kind == "boolean":
            schema = {"type": "boolean"}
        else:
            schema = {"type": "string", "maxLength": _LONGEST}
            if self.choices:
                schema = {"type": "string", "enum": list(self.choices)}
        return schema if self.default is None else schema | {"default": self.default}


Parameters = Mapping[str, Parameter]
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def read_query(arguments: Mapping[str, str], parameters: Parameters) -> dict[str, Any]:
    """Return the values of all `parameters` from the arguments of a URL, including default values.

    Raises:
        ApiError: status 400, if an argument is unknown or invalid, or a required parameter is missing.
    """
    for name in arguments:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(parameters) or 'none'}"
            raise ApiError(400, "unknown_parameter", f"unknown parameter '{name[:80]}'; {hint}")
    return {name: parameter.read(name, arguments.get(name)) for name, parameter in parameters.items()}


def _wrong(name: str, problem: str) -> ApiError:
    return ApiError(400, "invalid_parameter", f"'{name}' {problem}", param=name)
