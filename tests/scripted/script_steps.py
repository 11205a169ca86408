"""What a scripted endpoint does when it is asked: it says something, or refuses."""

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
        """The arguments as they are sent."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


@dataclass(frozen=True)
class Respond:
    """One answer.

    Attributes:
        tokens: of prompt and answer.
        cached: of the prompt's tokens.
        finish: `stop`, `length` or `refusal`; one that stops with calls stops for them.
        cut_after: events after which the connection is cut.
        hold_after: events after which nothing comes until the endpoint is released or the client hangs up.
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
class RespondError:
    """No answer, but an error."""

    status: int
    body: Any = ""
    headers: dict[str, str] = field(default_factory=dict)
