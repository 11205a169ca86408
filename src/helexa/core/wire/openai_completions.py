"""OpenAI text completions: the request, and the shapes of the answer."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import orjson
from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from helexa.core.errors import invalid_body
from helexa.core.wire.generation import MAX_ALTERNATIVES, GenerationRequest
from helexa.core.wire.usage import Usage

MAX_ANSWERS = 128
"""To all prompts of a request together."""

Prompt = str | list[int]
_Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_ANSWERS)]
_Ids = Annotated[list[int], Field(min_length=1)]
_Prompts = (
    Annotated[str, Field(min_length=1)]
    | _Ids
    | _Texts
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_ANSWERS)]
)


def _prompts(value: Any) -> list[Prompt]:
    """Return the prompts of `prompt`: one, or a list of several."""
    is_batch = isinstance(value, list) and bool(value) and all(isinstance(item, str | list) for item in value)
    prompts: list[Any] = value if is_batch else [value]
    if len(prompts) > MAX_ANSWERS:
        raise PydanticCustomError("prompt", "must be at most {most} prompts", {"most": MAX_ANSWERS})
    for index, prompt in enumerate(prompts):
        label = f"prompt {index} " if len(prompts) > 1 else ""
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise PydanticCustomError("prompt", "{place}must be a string or a list of token ids", {"place": label})
        if not prompt:
            raise PydanticCustomError("prompt", "{place}must not be empty", {"place": label})
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`: each prompt is text, or the token ids themselves."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts, json_schema_input_type=_Prompts)]
    max_tokens: int | None = Field(None, ge=0)
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

    @property
    def answers(self) -> int:
        """Number of answers to all prompts."""
        return len(self.prompt) * (self.n or 1)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompts' tokens are wanted, too."""
        return bool(self.echo) and self.logprobs is not None

    def refuse_unsupported(self) -> None:
        """Refuse too many answers, and what is neither continuing a prompt nor text, by name."""
        super().refuse_unsupported()
        if self.answers > MAX_ANSWERS:
            raise invalid_body(
                f"n: {len(self.prompt)} prompts with {self.n} answers each are over the limit of {MAX_ANSWERS}", "n"
            )
        self.refuse("suffix")
        self.refuse("best_of", (1, self.n))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids, in prompts too, that the model does not have."""
        super().check_vocabulary(vocab_size)
        for position, prompt in enumerate(self.prompt):
            field = f"prompt.{position}" if len(self.prompt) > 1 else "prompt"
            for index, token in enumerate(prompt if isinstance(prompt, list) else ()):
                if not 0 <= token < vocab_size:
                    raise invalid_body(f"{field}.{index}: {token} is not a token id below {vocab_size}", "prompt")


class CompletionLogprobs(TypedDict):
    """Of each token: its text, its log-probability, those of the likeliest ones, itself included, by their texts and
    encoded already, and where it stands in the choice's text. The first token of an echoed prompt has only null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[orjson.Fragment | None]
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
