"""Sampling options of a request."""

from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict


class SamplingOptions(TypedDict, total=False):
    """Type of keyword arguments with the same names as the fields of `Sampling`."""

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
    """Sampling options of a request.

    If an option is None, the value in the model's `generation_config.json` is used. If the file has no value, the
    option is off.

    Attributes:
        max_tokens: maximum number of tokens to generate. None means up to the context size in a private engine, or up
            to the server's limit on a server.
        temperature: randomness. With 0, the most likely token is always selected.
        top_p, top_k, min_p: restrict sampling to likely tokens.
        repetition_penalty, frequency_penalty, presence_penalty: make tokens that already occurred less likely.
        seed: random seed for reproducible responses. If a call has several prompts or requests several responses,
            response number i (from 0) uses `seed + i`. None selects random seeds, which the completions report.
        stop: strings that end the response. They are not part of the response.
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
        """Return a copy of the sampling options in which the values in `options` replace the current values.

        Raises:
            TypeError: an option is unknown.
        """
        return replace(self, **options)

    def body(self) -> dict[str, Any]:
        """Return the options as fields of a JSON request body. Options that are None are omitted."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not None}
