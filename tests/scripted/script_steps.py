"""Steps of a scripted endpoint: send a message, or an error response."""

import json
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A tool call.

    Attributes:
        arguments: a string stands for arguments as the model wrote them.
        id: empty for `call_<number of the question>_<place in the answer>`.
    """

    name: str
    arguments: Json | str = field(default_factory=dict)
    id: str = ""

    @property
    def text(self) -> str:
        """The arguments as JSON text."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


@dataclass(frozen=True)
class Say:
    """A streamed message.

    Attributes:
        tokens: token counts of the prompt and of the message.
        cached: number of cached prompt tokens.
        finish: `stop`, `length` or `refusal`; `stop` with calls is reported as the API's reason for tool calls.
        cut_after: number of events after which the endpoint closes the connection.
        hold_after: number of events after which the stream pauses until the endpoint is released or the client
            disconnects.
    """

    text: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    tokens: tuple[int, int] = (100, 20)
    cached: int = 0
    finish: str = "stop"
    cut_after: int | None = None
    hold_after: int | None = None


@dataclass(frozen=True)
class Reject:
    """An error response."""

    status: int
    body: Any = ""
    headers: dict[str, str] = field(default_factory=dict)
