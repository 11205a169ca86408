"""Request and response bodies of OpenAI's text completions API, `/v1/completions`."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import orjson
from pydantic import BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from helexa.core.errors import invalid_body
from helexa.core.wire.request import MAX_ALTERNATIVES, GenerationRequest
from helexa.core.wire.usage_and_encoded_lists import Usage

MAX_TOTAL_CHOICES = 128  # maximum number of completions that one request may ask for, over all of its prompts

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
    """Check the field `prompt`, and return it as a list of prompts."""
    is_list = isinstance(value, list) and bool(value) and all(isinstance(item, str | list) for item in value)
    prompts: list[Any] = value if is_list else [value]
    if len(prompts) > MAX_TOTAL_CHOICES:
        raise PydanticCustomError(
            "prompt",
            "a request must have at most {maximum} prompts, not {count}; send several requests",
            {"maximum": MAX_TOTAL_CHOICES, "count": len(prompts)},
        )
    for index, prompt in enumerate(prompts):
        place = f"prompt {index}" if len(prompts) > 1 else "the prompt"
        if not isinstance(prompt, str) and not _is_ids(prompt):
            raise PydanticCustomError("prompt", "{place} must be a string or a list of token ids", {"place": place})
        if not prompt:
            raise PydanticCustomError("prompt", "{place} must not be empty", {"place": place})
    return prompts


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`.

    Each prompt is a text or a list of token ids.
    """

    prompt: Annotated[list[Prompt], PlainValidator(_prompts, json_schema_input_type=_Prompts)]
    echo: bool | None = None
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_ALTERNATIVES),
        BeforeValidator(lambda value: None if value is False else value),
    ] = None

    @property
    def alternatives(self) -> int | None:
        """Number of likely tokens to report at each position; None for no logprobs."""
        return self.logprobs

    @property
    def permits_no_output(self) -> bool:
        """Whether `max_tokens` may be 0. The prompt is then only scored."""
        return True

    @property
    def answers(self) -> int:
        """Number of completions that the request asks for, for all its prompts together."""
        return len(self.prompt) * (self.n or 1)

    @property
    def scores_prompt(self) -> bool:
        """Whether `echo` and `logprobs` request log-probabilities of the prompt."""
        return bool(self.echo) and self.logprobs is not None

    def reject_unsupported(self) -> None:
        """Raise ApiError 400 for too many completions or an unsupported parameter."""
        super().reject_unsupported()
        if self.answers > MAX_TOTAL_CHOICES:
            raise invalid_body(
                f"n: {len(self.prompt)} prompts x {self.n} completions exceed {MAX_TOTAL_CHOICES}; send fewer "
                "prompts, or a smaller n",
                "n",
            )
        self.reject("suffix")
        self.reject("best_of", (1, self.n))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that the token ids of the request are less than `vocab_size`.

        Raises:
            ApiError: 400 `invalid_request_body`: a token id is out of range. The message names the field and the id.
        """
        super().check_vocabulary(vocab_size)
        for place, prompt in enumerate(self.prompt):
            field = f"prompt.{place}" if len(self.prompt) > 1 else "prompt"
            for index, token in enumerate(prompt if isinstance(prompt, list) else ()):
                if not 0 <= token < vocab_size:
                    raise invalid_body(
                        f"{field}.{index}: {token} is not a token id below {vocab_size}, the size of the vocabulary",
                        "prompt",
                    )


class CompletionLogprobs(TypedDict):
    """Log-probabilities of one text completion, as parallel lists.

    The first token of an echoed prompt has no log-probability (null).
    """

    tokens: list[str]  # text of each token
    token_logprobs: list[float | None]  # log-probability of each token
    # A JSON object for each token. The keys are the texts of this token and of the most likely tokens at its position,
    # and the values are log-probabilities.
    top_logprobs: list[orjson.Fragment | None]
    text_offset: list[int]  # index of each token's first character in the completion's text


class CompletionChoice(TypedDict):
    """One text completion, or the part that one event of its stream adds."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str]


class Completion(TypedDict):
    """The body of a text completion's response, or one event of its stream.

    With `stream_options.include_usage`, the last event has `usage` and no choices, and in the events before it, `usage`
    is null.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
