"""What is asked of a model, in no dialect."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation, text alone."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A request for one streamed answer.

    Attributes:
        fixed_length: what is said does not matter, only how fast: go on until `max_tokens`, where the server knows how
            to, at temperature 1. The likeliest answer of many a model ends in a loop, in which an engine that guesses
            ahead is several times as fast: then samples tell how soon that was. Others are answered at temperature 0.
        schema: a JSON schema that the answer has to follow.
    """

    model: str
    turns: Sequence[Turn]
    max_tokens: int
    fixed_length: bool = False
    tools: Sequence[Tool] = ()
    schema: Mapping[str, Any] | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """How tokens are chosen, as both dialects say it."""
        return {"temperature": 1, "top_p": 1} if self.fixed_length else {"temperature": 0}
