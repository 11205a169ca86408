"""Structured output: the output format that a request requires, in OpenAI's `response_format` or in vLLM's fields."""

from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import Field

from helexa.core.errors import invalid_body, unsupported_parameter
from helexa.core.wire.request import WireRequest

_KINDS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "lark", "json_object": "object"}


@dataclass(frozen=True)
class AnswerShape:
    """The output format that a request requires: the constraint for structured output.

    Attributes:
        kind: a JSON Schema, a regular expression, a choice of strings, or a Lark grammar.
        value: the JSON Schema, the list of strings, or the text of the regular expression or grammar.
        param: name of the request field that states the format.
        lenient: True if keywords of the JSON Schema that cannot be enforced may be ignored.
    """

    kind: Literal["schema", "regex", "choice", "lark"]
    value: Any
    param: str
    lenient: bool = False


class ShapedRequest(WireRequest):
    """Base class of requests that may require an output format (structured output), in one of several fields."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None

    @property
    def shape(self) -> AnswerShape | None:
        """The required output format, or None if the output is not constrained.

        Raises:
            ApiError: 400: the format is invalid or not supported, or several fields state a format.
        """
        shapes = [
            shape
            for shape in (
                _shape_of_format(self.response_format),
                *(_shape_of_option(f"structured_outputs.{name}", name, value) for name, value in self._options()),
                _shape_of_option("guided_json", "json", self.guided_json),
                _shape_of_option("guided_regex", "regex", self.guided_regex),
                _shape_of_option("guided_choice", "choice", self.guided_choice),
                _shape_of_option("guided_grammar", "grammar", self.guided_grammar),
            )
            if shape is not None
        ]
        if len(shapes) > 1:
            first_param, second_param = shapes[0].param, shapes[1].param
            raise invalid_body(f"{second_param}: cannot be combined with '{first_param}'; send one", second_param)
        return shapes[0] if shapes else None

    def reject_unsupported(self) -> None:
        """Raise an error if the required output format is invalid or not supported."""
        _ = self.shape
        for name in ("guided_whitespace_pattern", "structural_tag"):
            if self.extra(name) is not None:
                raise unsupported_parameter(name)

    def _options(self) -> list[tuple[str, Any]]:
        options = [(name, value) for name, value in (self.structured_outputs or {}).items() if value is not None]
        for name, value in options:
            if name not in _KINDS and value is not False:
                raise unsupported_parameter(f"structured_outputs.{name}"[:100])
        return [(name, value) for name, value in options if name in _KINDS]


def _shape_of_format(value: dict[str, Any] | None) -> AnswerShape | None:
    kind = None if value is None else value.get("type")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return AnswerShape("schema", {"type": "object"}, "response_format")
    if kind != "json_schema":
        raise unsupported_parameter("response_format", f"the type of 'response_format' cannot be {str(kind)[:80]!r}")
    json_schema = value.get("json_schema")
    if not isinstance(json_schema, dict) or not isinstance(schema := json_schema.get("schema"), dict | bool):
        raise invalid_body("response_format.json_schema.schema: must be a JSON Schema", "response_format")
    return AnswerShape("schema", schema, "response_format", lenient=json_schema.get("strict") is False)


def _shape_of_option(param: str, name: str, value: Any) -> AnswerShape | None:
    if value is None or (name == "json_object" and value is False):
        return None
    match _KINDS[name], value:
        case "object", True:
            return AnswerShape("schema", {"type": "object"}, param)
        case "schema", dict() | bool():
            return AnswerShape("schema", value, param)
        case "schema", str():
            return AnswerShape("schema", _schema_in(param, value), param)
        case "choice", list() if all(isinstance(choice, str) for choice in value):
            return AnswerShape("choice", value, param)
        case ("regex" | "lark") as kind, str():
            return AnswerShape(kind, value, param)
    raise invalid_body(f"{param}: has the wrong type", param)


def _schema_in(param: str, text: str) -> dict[str, Any] | bool:
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid_body(f"{param}: not valid JSON: {error}", param) from None
    if not isinstance(schema, dict | bool):
        raise invalid_body(f"{param}: must be a JSON Schema", param)
    return schema
