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
    """A request for one streamed answer at temperature 0.

    Attributes:
        fixed_length: go on until `max_tokens`, where the server knows how to.
        schema: a JSON schema that the answer has to follow.
    """

    model: str
    turns: Sequence[Turn]
    max_tokens: int
    fixed_length: bool = False
    tools: Sequence[Tool] = ()
    schema: Mapping[str, Any] | None = None
