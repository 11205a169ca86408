"""Requests to models, independent of the API format of the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Turn:
    """A text message of a conversation."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON Schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A request for one streamed response.

    Attributes:
        model: name of the model.
        turns: messages of the conversation.
        max_tokens: maximum number of tokens of the response.
        fixed_length: True if the request measures speed and the text of the response does not matter. If the server
            supports `ignore_eos`, it decodes exactly `max_tokens` tokens. The temperature is 1 if `fixed_length` is
            True, else 0. At temperature 0, responses often repeat themselves. Speculative decoding of repetitions is
            several times as fast as usual, so the measured speed would be too high.
        tools: functions that the model may call.
        schema: JSON Schema of the response, or None.
    """

    model: str
    turns: Sequence[Turn]
    max_tokens: int
    fixed_length: bool = False
    tools: Sequence[Tool] = ()
    schema: Mapping[str, Any] | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters. Their names are the same in all API formats."""
        return {"temperature": 1, "top_p": 1} if self.fixed_length else {"temperature": 0}
