"""Request and response bodies of OpenAI text completions."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import orjson
from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from helexa.core.errors import invalid_body
from helexa.core.wire.generation import MAX_ALTERNATIVES, GenerationRequest
from helexa.core.wire.usage import Usage

MAX_TOTAL_CHOICES = 128
"""Maximum number of completions of all prompts of a request together."""

Prompt = str | list[int]
_Texts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_TOTAL_CHOICES)]
_Ids = Annotated[list[int], Field(min_length=1)]
_Prompts = (
    Annotated[str, Field(min_length=1)]
    | _Ids
    | _Texts
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_TOTAL_CHOICES)]
)


def _prompts(value: Any) -> list[Prompt]:
    """Return the list of prompts in `prompt`, which is one prompt or a list of prompts."""
    is_list = isinstance(value, list) and bool(value) and all(isinstance(item, str | list) for item in value)
    prompts: list[Any] = value if is_list else [value]
    if len(prompts) > MAX_TOTAL_CHOICES:
        raise PydanticCustomError("prompt", "must be at most {maximum} prompts", {"maximum": MAX_TOTAL_CHOICES})
    for index, prompt in enumerate(prompts):
        place = f"prompt {index} " if len(prompts) > 1 else ""
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise PydanticCustomError("prompt", "{place}must be a string or a list of token ids", {"place": place})
        if not prompt:
            raise PydanticCustomError("prompt", "{place}must not be empty", {"place": place})
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`. Each prompt is a text or a list of token ids."""

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
        """Number of alternatives per token, for log-probabilities; None if the client requests none."""
        return self.logprobs

    @property
    def answers(self) -> int:
        """Number of completions of all prompts together."""
        return len(self.prompt) * (self.n or 1)

    @property
    def scores_prompt(self) -> bool:
        """Whether the client requests log-probabilities of the prompts' tokens."""
        return bool(self.echo) and self.logprobs is not None

    def reject_unsupported(self) -> None:
        """Raise an error if the request asks for too many completions or has unsupported parameters."""
        super().reject_unsupported()
        if self.answers > MAX_TOTAL_CHOICES:
            raise invalid_body(
                f"n: {len(self.prompt)} prompts x {self.n} completions are over the limit of {MAX_TOTAL_CHOICES}",
                "n",
            )
        self.reject("suffix")
        self.reject("best_of", (1, self.n))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise an error if a prompt or `logit_bias` contains a token id outside of the model's vocabulary."""
        super().check_vocabulary(vocab_size)
        for place, prompt in enumerate(self.prompt):
            field = f"prompt.{place}" if len(self.prompt) > 1 else "prompt"
            for index, token in enumerate(prompt if isinstance(prompt, list) else ()):
                if not 0 <= token < vocab_size:
                    raise invalid_body(f"{field}.{index}: {token} is not a token id below {vocab_size}", "prompt")


class CompletionLogprobs(TypedDict):
    """Parallel lists with one entry per token of a choice.

    The first token of an echoed prompt has null log-probabilities.

    Attributes:
        tokens: text of the token.
        token_logprobs: log-probability of the token.
        top_logprobs: JSON object of the log-probabilities of the token and the most likely tokens, by their texts.
        text_offset: offset of the token in the choice's text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[orjson.Fragment | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One completion, or a chunk's addition to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str]


class Completion(TypedDict):
    """A response, or one event of a streaming response.

    With `stream_options.include_usage`, the last event has the usage and no choices, and `usage` is null in all other
    events.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
