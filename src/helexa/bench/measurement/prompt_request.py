"""Requests to models, independent of the API format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Turn:
    """One text message of a conversation."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON Schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A request for one streamed answer.

    Attributes:
        model: name of the model.
        turns: messages of the conversation.
        max_tokens: maximum tokens of the answer.
        fixed_length: whether only the speed matters. The server then decodes until `max_tokens` if it supports
            `ignore_eos`, at temperature 1. Greedy answers often end in a loop, in which speculative decoding is several
            times as fast. All other requests use temperature 0.
        tools: functions that the model may call.
        schema: JSON Schema of the answer, or None.
    """

    model: str
    turns: Sequence[Turn]
    max_tokens: int
    fixed_length: bool = False
    tools: Sequence[Tool] = ()
    schema: Mapping[str, Any] | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters, which are the same in all API formats."""
        return {"temperature": 1, "top_p": 1} if self.fixed_length else {"temperature": 0}
