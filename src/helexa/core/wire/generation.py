"""Request parameters that chat completions, completions and the Responses API share."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from helexa.core.errors import invalid_body, unsupported_parameter
from helexa.core.wire.answer_shape import ShapedRequest
from helexa.core.wire.request import WireObject

MAX_CHOICES = 16
MAX_ALTERNATIVES = 20
MAX_LOGPROBS = 1 << 19
"""Maximum number of log-probabilities in one response, including those of alternative tokens."""

# Unsupported parameters of other servers that would change the output, with the values that would not change it. Null
# and empty values are always accepted.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": (),
    "chat_template": (),
    "include_stop_str_in_output": (),
    "logits_processors": (),
    "min_tokens": (),
    "prediction": (),
    "stop_token_ids": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "verbosity": ("medium",),
}

StopString = Annotated[str, Field(min_length=1, max_length=256)]
LogitBias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(WireObject):
    """Options of a streaming response."""

    include_usage: bool | None = None


class GenerationRequest(ShapedRequest):
    """Base class of generation requests, with sampling and streaming parameters.

    None means that a parameter is not set.
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=1_000_000)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = None
    stop: Annotated[
        list[StopString] | None,
        Field(max_length=16),
        BeforeValidator(
            lambda value: [value] if isinstance(value, str) else value,
            json_schema_input_type=None | StopString | Annotated[list[StopString], Field(max_length=16)],
        ),
    ] = None
    logit_bias: dict[int, LogitBias] | None = None
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    user: str | None = None

    @property
    def output_limit(self) -> int | None:
        """Maximum number of tokens of each completion, or None if the request states no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def answers(self) -> int:
        """Number of completions that the request asks for (`n`, default 1)."""
        return self.n or 1

    @property
    def scores_prompt(self) -> bool:
        """Whether the client requests log-probabilities of the prompt tokens."""
        return False

    @property
    def includes_usage(self) -> bool:
        """Whether the client requests token counts at the end of a stream."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def alternatives(self) -> int | None:
        """Requested number of alternative tokens per output token, or None if no log-probabilities are requested."""
        return None

    def reject_unsupported(self) -> None:
        """Raise an error for parameters that only other servers support and that would change the output."""
        super().reject_unsupported()
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
                raise invalid_body(f"logit_bias.{token}: not a token id below {vocab_size}", "logit_bias")

    def check_logprobs(self, prompt: int, limit: int) -> None:
        """Check that the response cannot contain more than `MAX_LOGPROBS` log-probabilities.

        Args:
            prompt: number of prompt tokens.
            limit: maximum number of tokens of each completion.

        Raises:
            ApiError: 400 `unsupported_parameter`: the response could contain more log-probabilities.
        """
        tokens = limit + (prompt if self.scores_prompt else 0)
        if self.alternatives is not None and self.answers * tokens * (self.alternatives + 1) > MAX_LOGPROBS:
            raise unsupported_parameter(
                "logprobs",
                f"'logprobs' of {self.answers} x {tokens} tokens with {self.alternatives} alternatives each are over "
                f"the limit of {MAX_LOGPROBS}; request fewer alternatives or fewer tokens",
            )

    def reject(self, name: str, accepted: tuple[Any, ...] = ()) -> None:
        """Raise an error if an undeclared parameter has an unsupported value.

        Values that are empty, zero or in `accepted` are allowed.

        Args:
            name: name of a parameter that the class does not declare.
            accepted: further allowed values.
        """
        value = self.extra(name)
        if value and value not in accepted:
            raise unsupported_parameter(name)
