"""Base classes of request bodies: validation, output formats, sampling.

Declared fields are validated strictly. Undeclared fields are kept unchecked. Structured output is requested in OpenAI's
`response_format` or in vLLM's fields.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from helexa.core.errors import ApiError, invalid_body, malformed_json, missing_model, unsupported_parameter
from helexa.core.sampling import NumericSampling

_KINDS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "lark", "json_object": "object"}
# Fields of llama.cpp and SGLang that require an output format, with the equivalent member of `structured_outputs`.
_OTHER_NAMES = {"json_schema": "json", "regex": "regex"}
_VALUES = {"schema": "a JSON Schema", "choice": "a list of strings", "object": "true"}  # other kinds have strings

NO_LIMIT = -1  # value of an output limit that means no limit
MAX_CHOICES = 16
MAX_ALTERNATIVES = 20
MAX_LOGPROBS = 1 << 19  # maximum number of log-probabilities in one response, including those of alternative tokens

# Unsupported parameters of other servers that would change the output, with the values that would not change it. Null
# and empty values are always accepted.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": (),
    "chat_template": (),
    "ebnf": (),
    "grammar": (),
    "include_stop_str_in_output": (),
    "logits_processors": (),
    "min_tokens": (),
    "stop_token_ids": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "verbosity": ("medium",),
}

StopString = Annotated[str, Field(min_length=1, max_length=256)]
LogitBias = Annotated[float, Field(ge=-100, le=100)]


# Escape sequences in JSON: a pair of surrogates, a lone surrogate (group 1), or another escape sequence.
_SURROGATES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)


def without_lone_surrogates(body: bytes) -> bytes:
    """Return a request's JSON with `\\ufffd` in place of escapes of lone surrogates.

    JSON parsers reject lone surrogates.
    """
    return _SURROGATES.sub(lambda match: b"\\ufffd" if match[1] else match[0], body)


class WireObject(BaseModel):
    """Base class of all JSON objects in a request. Wrong types are not converted."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    def extra(self, name: str) -> Any:
        """Return the value of an undeclared field, or None if the object lacks the field."""
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
            # JavaScript clients, for example Claude Code, may cut a text within an emoji. Without the repair, all later
            # requests of the conversation would fail, too.
            if error.errors()[0]["type"] == "json_invalid" and (repaired := without_lone_surrogates(body)) != body:
                return cls.parse(repaired)
            raise to_api_error(error) from None
        return request._validated()

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> Self:
        """Validate a request that was converted from another API format.

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
        """Raise a 400 error for the first parameter that helexa does not implement.

        Subclasses extend this check.
        """


def to_api_error(error: ValidationError) -> ApiError:
    """Convert pydantic's error to a 400 error that names the first invalid field."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return malformed_json(first["ctx"]["error"] if "ctx" in first else first["msg"])
    path = ".".join(str(part) for part in first["loc"] if part != "[key]")[:200]
    return invalid_body(f"{path}: {first['msg']}" if path else first["msg"], path or None)


@dataclass(frozen=True)
class AnswerShape:
    """The output format that a request requires: the constraint for structured output."""

    # a JSON Schema, a regular expression, a choice of strings, or a Lark grammar
    kind: Literal["schema", "regex", "choice", "lark"]
    value: Any  # the JSON Schema, the list of strings, or the text of the regular expression or grammar
    param: str  # name of the request field that states the format
    lenient: bool = False  # True if keywords of the JSON Schema that cannot be enforced may be ignored


class ShapedRequest(WireRequest):
    """Base class of requests that may require an output format."""

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
                *(_shape_of_option(name, option, self.extra(name) or None) for name, option in _OTHER_NAMES.items()),
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
    # llama.cpp, Together and others have the schema beside the type, also for `json_object`.
    schema = value.get("schema")
    if kind == "json_object" and schema is None:
        return AnswerShape("schema", {"type": "object"}, "response_format")
    if kind not in ("json_object", "json_schema"):
        raise unsupported_parameter(
            "response_format",
            f"the type of 'response_format' cannot be {str(kind)[:80]!r}; use text, json_object or json_schema",
        )
    json_schema = value.get("json_schema") if kind == "json_schema" else None
    fields = json_schema if isinstance(json_schema, dict) else value
    if not isinstance(schema := fields.get("schema"), dict | bool):
        place = "schema" if fields is value and schema is not None else "json_schema.schema"
        raise invalid_body(f"response_format.{place}: must be a JSON Schema", "response_format")
    return AnswerShape("schema", schema, "response_format", lenient=fields.get("strict") is False)


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
    raise invalid_body(f"{param}: has the wrong type; send {_VALUES.get(_KINDS[name], 'a string')}", param)


def _schema_in(param: str, text: str) -> dict[str, Any] | bool:
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise invalid_body(f"{param}: not valid JSON: {error}; send a JSON Schema", param) from None
    if not isinstance(schema, dict | bool):
        raise invalid_body(f"{param}: must be a JSON Schema", param)
    return schema


def _stop_strings(value: Any) -> Any:
    """Return the field `stop` as a list."""
    strings = [value] if isinstance(value, str) else value
    # An empty string, which OpenAI's API accepts, stops nothing.
    return [string for string in strings if string != ""] if isinstance(strings, list) else strings


class StreamOptions(WireObject):
    """The field `stream_options` of a request: options of a streaming response."""

    include_usage: bool | None = None


# Not derived from `Sampling`, because the field `stop` would override a field of a dataclass. In subclasses, pydantic
# (2.14) drops the validators of such a field.
class GenerationRequest(ShapedRequest, NumericSampling):  # pyright: ignore[reportGeneralTypeIssues] - is not frozen
    """Base class of generation requests, with sampling and streaming parameters.

    None means that a parameter is not set.
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # `reject_unsupported` checks the range of `max_tokens` and `max_completion_tokens`. -1 means no limit, as in
    # llama.cpp and LM Studio.
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: Annotated[
        list[StopString] | None,
        Field(max_length=16),
        BeforeValidator(
            _stop_strings,
            json_schema_input_type=None | str | Annotated[list[StopString], Field(max_length=16)],
        ),
    ] = None
    logit_bias: dict[int, LogitBias] | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    user: str | None = None

    @property
    def output_limit(self) -> int | None:
        """Maximum number of tokens of each completion, or None if the request sets none.

        `max_completion_tokens` takes precedence over `max_tokens`. -1 counts as not set.
        """
        limits = (self.max_completion_tokens, self.max_tokens)
        return next((limit for limit in limits if limit not in (None, NO_LIMIT)), None)

    @property
    def permits_no_output(self) -> bool:
        """Whether `max_tokens` may be 0; False except in a subclass."""
        return False

    @property
    def answers(self) -> int:
        """Number of completions that the request asks for (`n`, default 1)."""
        return self.n or 1

    @property
    def scores_prompt(self) -> bool:
        """Whether the client requests logprobs of its prompt; False except in a subclass."""
        return False

    @property
    def includes_usage(self) -> bool:
        """Whether the client requests token counts at the end of a stream."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def alternatives(self) -> int | None:
        """Number of likely tokens to report at each position; None except in subclasses."""
        return None

    def reject_unsupported(self) -> None:
        """Raise ApiError 400 for an unsupported parameter or a too low output limit."""
        super().reject_unsupported()
        for name in ("max_tokens", "max_completion_tokens"):
            least = 0 if self.permits_no_output and name == "max_tokens" else 1
            if (limit := getattr(self, name)) is not None and limit != NO_LIMIT and limit < least:
                raise invalid_body(f"{name}: must be at least {least}, or {NO_LIMIT} for no limit, not {limit}", name)
        for name, accepted_values in _UNSUPPORTED.items():
            self.reject(name, accepted_values)
        prompt_logprobs = self.extra("prompt_logprobs")
        if prompt_logprobs is not None and prompt_logprobs is not False:  # 0 requests log-probabilities, too
            raise unsupported_parameter("prompt_logprobs")
        if self.extra("skip_special_tokens") is False:
            raise unsupported_parameter("skip_special_tokens")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that all token ids in the request are less than `vocab_size`.

        Raises:
            ApiError: 400 `invalid_request_body`: a token id is out of range. The message names the field and the id.
        """
        for token in self.logit_bias or {}:
            if not 0 <= token < vocab_size:
                raise invalid_body(
                    f"logit_bias.{token}: not a token id below {vocab_size}, the size of the vocabulary", "logit_bias"
                )

    def limited_by_logprobs(self, prompt: int, limit: int) -> int:
        """Return an output limit, in tokens, with at most `MAX_LOGPROBS` logprobs.

        The result is lower than `limit` only if the client sets no output limit.

        Args:
            prompt: number of prompt tokens.
            limit: maximum number of tokens of each completion.

        Raises:
            ApiError: 400 `unsupported_parameter`: even so, the response could exceed `MAX_LOGPROBS`.
        """
        if self.alternatives is None:
            return limit
        scored = prompt if self.scores_prompt else 0
        fitting = MAX_LOGPROBS // (self.answers * (self.alternatives + 1)) - scored
        if limit <= fitting:
            return limit
        # If the client sets no limit, a lower limit is no error: the default is the rest of the context, which few
        # answers need.
        if self.output_limit is None and fitting > 0:
            return fitting
        raise unsupported_parameter(
            "logprobs",
            f"'logprobs' of {self.answers} x {limit + scored} tokens with {self.alternatives} alternatives each are "
            f"over the limit of {MAX_LOGPROBS}; request fewer alternatives or fewer tokens",
        )

    def reject(self, name: str, accepted: tuple[Any, ...] = ()) -> None:
        """Raise an error if the undeclared parameter `name` has an unsupported value.

        Values that are empty, zero or in `accepted` are allowed.
        """
        value = self.extra(name)
        if value and value not in accepted:
            raise unsupported_parameter(name)
