"""Sampling options of answers."""

from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict


class SamplingOptions(TypedDict, total=False):
    """Type of the keyword arguments that set the fields of `Sampling`."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    seed: int | None
    stop: str | list[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling options.

    An option that is None has the value in the model's `generation_config.json`. If the file has no value, the option
    is off.

    Attributes:
        max_tokens: maximum number of tokens of the answer. None is the context size in a private engine, and the
            server's limit on a server.
        temperature: randomness; 0 always selects the most likely token.
        top_p, top_k, min_p: restrict sampling to likely tokens.
        repetition_penalty, frequency_penalty, presence_penalty: make tokens that already occurred less likely.
        seed: random seed of reproducible answers. If a call has several answers or prompts, number i (from 0) uses
            `seed + i`. None selects random seeds, which the completions report.
        stop: strings that end the answer and are not part of it.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def replaced(self, options: SamplingOptions) -> "Sampling":
        """Return a copy in which the values in `options` replace the current values.

        Raises:
            TypeError: an option is unknown.
        """
        return replace(self, **options)

    def body(self) -> dict[str, Any]:
        """Return the options as fields of a request body, without options that are None."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not None}
