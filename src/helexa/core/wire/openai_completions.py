"""OpenAI text completions: the request, and the shapes of the answer."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import orjson
from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from helexa.core.errors import invalid_body, unsupported_parameter
from helexa.core.wire.generation import MAX_ALTERNATIVES, GenerationRequest
from helexa.core.wire.usage import Usage

_Prompt = str | list[int] | list[str] | list[list[int]]


def _prompt(value: Any) -> str | list[int] | list[Any]:
    """Unwrap a list of one prompt; several prompts stay a list of lists or strings, for a refusal by name."""
    if isinstance(value, list) and len(value) == 1 and (isinstance(value[0], str) or _is_ids(value[0])):
        value = value[0]
    if isinstance(value, str) or _is_ids(value):
        if not value:
            raise PydanticCustomError("prompt", "must not be empty")
        return value
    if isinstance(value, list) and all(isinstance(one, str) or _is_ids(one) for one in value):
        return value
    raise PydanticCustomError("prompt", "must be a string or a list of token ids")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`: `prompt` is text, or the token ids themselves."""

    prompt: Annotated[str | list[int], PlainValidator(_prompt, json_schema_input_type=_Prompt)]
    echo: bool | None = None
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_ALTERNATIVES),
        BeforeValidator(lambda value: None if value is False else value),
    ] = None

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to tell of with each token's log-probability, None to tell neither."""
        return self.logprobs

    def refuse_unsupported(self) -> None:
        """Refuse several prompts, and what is neither continuing a prompt nor text, by name."""
        super().refuse_unsupported()
        if not isinstance(self.prompt, str) and not _is_ids(self.prompt):
            raise unsupported_parameter("prompt", "several prompts in one request are not supported; send one each")
        self.refuse("suffix")
        self.refuse("best_of", (1, self.n))
        if self.echo and self.logprobs is not None:
            raise unsupported_parameter("echo", "'echo' with 'logprobs' is not supported: prompts have none")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids, in the prompt too, that the model does not have."""
        super().check_vocabulary(vocab_size)
        if isinstance(self.prompt, list):
            for index, token in enumerate(self.prompt):
                if not 0 <= token < vocab_size:
                    raise invalid_body(f"prompt.{index}: {token} is not a token id below {vocab_size}", "prompt")


class CompletionLogprobs(TypedDict):
    """Of each token: its text, its log-probability, those of the likeliest ones, itself included, by their texts and
    encoded already, and where it stands in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[orjson.Fragment]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One continuation, whole or in part."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str]


class Completion(TypedDict):
    """A reply, or one event of a streamed reply.

    With `stream_options.include_usage`, the last event has the usage and no choices, and `usage` is null in all others.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
