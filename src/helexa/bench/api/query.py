"""What a URL asks for, read strictly: a parameter that nobody knows is a mistake, not a wish to be ignored."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from helexa.core.errors import ApiError

_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a query.

    Attributes:
        about: what it does, for people.
        kind: of its value.
        default: where it is not given, or empty.
        least, most: bounds of an integer.
        choices: the only texts that are allowed; empty for any.
        required: it must be given.
    """

    about: str
    kind: Literal["text", "integer", "boolean"] = "text"
    default: Any = None
    least: int = 0
    most: int = 2**53
    choices: tuple[str, ...] = ()
    required: bool = False

    def read(self, name: str, text: str | None) -> Any:
        """The value.

        Raises:
            ApiError: 400; it cannot be read, or is missing.
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
        """As JSON Schema."""
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


def read_query(given: Mapping[str, str], parameters: Parameters) -> dict[str, Any]:
    """All parameters with their values.

    Raises:
        ApiError: 400; one is unknown, missing or wrong.
    """
    for name in given:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(parameters) or 'none'}"
            raise ApiError(400, "unknown_parameter", f"unknown parameter '{name[:80]}'; {hint}")
    return {name: parameter.read(name, given.get(name)) for name, parameter in parameters.items()}


def _wrong(name: str, what: str) -> ApiError:
    return ApiError(400, "invalid_parameter", f"'{name}' {what}", param=name)
