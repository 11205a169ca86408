"""Requests to models, and the events and errors of their responses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from helexa.acp.conversation_and_events import Message

ErrorKind = Literal[
    "auth", "budget", "rate_limit", "context_limit", "model_not_found", "invalid", "unavailable", "interrupted"
]
FinishReason = Literal["stop", "length", "tool_calls", "refusal"]
ThoughtLevel = Literal["default", "none", "low", "medium", "high"]


class ProviderError(Exception):
    """A request to an endpoint failed, or the response is incomplete."""

    def __init__(
        self, kind: ErrorKind, message: str, *, retry_after: float | None = None, context_limit: int | None = None
    ) -> None:
        super().__init__(message)
        # Cause of the error. It determines whether the agent retries, shortens the conversation, or reports the error.
        self.kind = kind
        self.message = message  # a sentence for the user, without secrets
        self.retry_after = retry_after  # seconds to wait before a retry, or None if the endpoint did not report a delay
        self.context_limit = context_limit  # context size in tokens, or None if the endpoint did not report it


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model may call; `schema` is the JSON Schema of its arguments."""

    name: str
    description: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request to a model, independent of the API format."""

    model: str
    system: str
    messages: Sequence[Message]  # the conversation. It must not contain `Summary` or `Cleared` entries.
    tools: Sequence[ToolSpec] = ()
    max_tokens: int | None = None  # maximum number of response tokens
    thought_level: ThoughtLevel = "default"  # reasoning effort
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A model event: a streamed chunk of the response's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A model event: a streamed chunk of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A model event: a streamed chunk of a tool call.

    All chunks of a call have the same `index`. The first chunk has the `id`, if the endpoint sends ids. One chunk, as a
    rule the first, has the `name`. If no chunk has a name, the joined `arguments` contain the whole call as text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """A model event: token counts of one request and its response.

    `input` includes `cached`, and `output` includes `reasoning`.
    """

    input: int
    output: int
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """A model event: the last event of a complete response."""

    reason: FinishReason
    # data of the endpoint, which the agent stores and sends back in later requests
    extras: dict[str, Any] = field(default_factory=dict)


ModelEvent = AnswerDelta | ReasoningDelta | CallDelta | Usage | End
