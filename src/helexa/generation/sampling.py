"""How tokens are chosen, and how many."""

from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, as keyword arguments."""

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
    """How an answer is sampled. None leaves it to the model's own `generation_config.json`; nothing else is on.

    Attributes:
        max_tokens: of the answer; None goes on until the model ends it or its context does (on a server: its limit).
        temperature: randomness; 0 always takes the likeliest token.
        top_p, top_k, min_p: leave only likely tokens to choose from.
        repetition_penalty, frequency_penalty, presence_penalty: make what was said already less likely.
        seed: makes an answer repeatable. Of several answers or prompts, number i has `seed + i`. None draws one for
            each, which its completion tells.
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
        """The same, with `options` in place of its own.

        Raises:
            TypeError: there is no such option.
        """
        return replace(self, **options)

    def body(self) -> dict[str, Any]:
        """The fields of a request that say so; what is None is left out."""
        options = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in options if value is not None}
